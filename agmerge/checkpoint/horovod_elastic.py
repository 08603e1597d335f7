"""Elastic training under ``horovod.torch.elastic``: its ``TorchState`` saves our optimizer by this file.

Horovod's own handler would make new workers step the optimizer before it broadcasts rank 0's state; a step of ours is a
collective that the others do not make. And residuals belong to their worker: surviving workers keep theirs, new ones
start from zero.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from agmerge.backends import horovod_elastic
from agmerge.checkpoint import rank_state
from agmerge.engine.optimizer_states import load_state
from agmerge.runtime import workers
from agmerge.runtime.broadcast import broadcast_optimizer_state


def prepare(kind: type[torch.optim.Optimizer]) -> None:
    """Make ``TorchState(optimizer=...)`` save optimizers of ``kind`` by a :class:`TorchStateHandler`, if needed."""
    if workers.elastic():
        horovod_elastic.register(kind, TorchStateHandler)


class TorchStateHandler:
    """Handler of an optimizer in a ``TorchState``: ``save`` at a commit, ``restore`` to it, ``sync`` after a reset."""

    def __init__(self, value: Any) -> None:
        """Save ``value``, a wrapper, at once."""
        self.value = value
        self.save()

    def set_value(self, value: Any) -> None:
        """Replace the optimizer by another one, and save that."""
        self.value = value
        self.save()

    def save(self) -> None:
        """Keep a copy, residuals included, in this process."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Go back to the copy. The group has broken: nothing may be sent."""
        reducer, inner = self.value._reducer, dict(self._saved)
        reducer.leave()
        reducer.discard()
        rank_state.load(reducer, inner.pop(rank_state.SECTION), own=True)
        load_state(self.value._inner, inner)

    def sync(self) -> None:
        """Collective. Load rank 0's state, and keep this worker's residuals. The next step connects to the group."""
        reducer = self.value._reducer
        if reducer.exchange.group.world is not None and reducer.exchange.group.world is workers.world():
            workers.renew()
            reducer.leave()
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()
