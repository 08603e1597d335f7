"""Reach the parameters that all workers have in common, where each of them may be ahead with its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from agmerge.engine.synchronizer import Synchronizer


class SharingMixin:
    """Offer, of what exchanges for a script, all that is about shared parameters.

    That may be a wrapped optimizer, one whose steps are followed, or a model in DistributedDataParallel.
    """

    _reducer: Synchronizer

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Let the parameters, inside, be those that all workers have in common: to evaluate, and to save.

        With ``sync="updates"`` a worker's own parameters are ahead of these. They are back afterwards, so that changes
        inside are lost. Nothing communicates. With ``sync="gradients"`` they are the same anyway.
        """
        with self._reducer.shared():
            yield

    def consolidate(self) -> None:
        """Collective. Exchange all that workers carry, whole: then parameters are equal on all ranks, to the bit.

        With ``sync="gradients"`` they are anyway, and nothing happens.
        """
        self._reducer.consolidate()

    def flush(self) -> None:
        """Collective. Apply what ``overlap=`` leaves to a later step, or ``merging="dear"`` to the next forward.

        With other arguments there is nothing. What DeAR leaves is under way already: ranks need not call this together.
        """
        self._reducer.flush()
