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
        """Give the model, inside this context, the parameters that all workers share. Evaluate and save in it.

        With ``sync="updates"`` each worker's own parameters are ahead of these. They are restored afterwards, so
        changes that you make inside are lost. Nothing is communicated. With ``sync="gradients"`` the parameters are the
        same anyway.
        """
        reducer = self._reducer
        with nullcontext() if reducer.combines_gradients else reducer.replica.showing():
            yield

    def consolidate(self) -> None:
        """Collective. Exchange all unsent updates, uncompressed, so that parameters are bitwise identical on all ranks.

        Call it after the last step with ``sync="updates"``. With ``sync="gradients"`` it does nothing.
        """
        if not self._reducer.combines_gradients:
            self._reducer.consolidate()

    def flush(self) -> None:
        """Collective. Apply the updates that are still under way.

        With ``overlap=`` these are updates that a later step would receive. With ``merging="dear"`` the next forward
        pass would apply them, and ranks need not call this together. With other settings it does nothing.
        """
        self._reducer.flush()
