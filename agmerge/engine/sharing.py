# SPDX-License-Identifier: Apache-2.0
"""Access to the shared parameters of all workers, where each worker may be ahead with its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from agmerge.engine.reducers import AnyReducer


class SharingMixin:
    """Methods about shared parameters, for all that exchanges for a script.

    That may be a wrapped optimizer, one with hooks on its steps, or a model in DistributedDataParallel.
    """

    _reducer: AnyReducer

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Make the parameters, inside, those that all workers share: to evaluate, and to save.

        With ``sync="updates"`` a worker's own parameters are ahead of these. They are restored afterwards, so that
        changes inside are lost. Nothing communicates. With ``sync="gradients"`` they are the same anyway.
        """
        reducer = self._reducer
        with nullcontext() if reducer.combines_gradients else reducer.replica.showing():
            yield

    def consolidate(self) -> None:
        """Collective. Exchange all unsent updates, dense: then parameters are equal on all ranks, to the bit.

        With ``sync="gradients"`` they are anyway, and nothing happens.
        """
        if not self._reducer.combines_gradients:
            self._reducer.consolidate()

    def flush(self) -> None:
        """Collective. Apply updates left to a later step by ``overlap=``, or to the next forward by ``merging="dear"``.

        With other arguments there are none. DeAR's messages are under way already: ranks need not call this together.
        """
        self._reducer.flush()
