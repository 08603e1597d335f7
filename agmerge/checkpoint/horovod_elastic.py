"""Let workers come and go, under ``horovod.torch.elastic``: its ``TorchState`` keeps our optimizer by this file.

Horovod's own handler would broadcast rank 0's state by a step of the optimizer on newcomers, which of ours is a
collective that the others do not make. And residuals belong to their worker: survivors keep theirs, newcomers start
from zero.
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
    """Let ``TorchState(optimizer=...)`` keep optimizers of ``kind`` by a :class:`TorchStateHandler`, if needed."""
    if workers.elastic():
        horovod_elastic.register(kind, TorchStateHandler)


class TorchStateHandler:
    """Keep an optimizer in a ``TorchState``: ``save`` at a commit, ``restore`` to it, ``sync`` after a reset."""

    def __init__(self, value: Any) -> None:
        """Save ``value``, a wrapper, at once."""
        self.value = value
        self.save()

    def set_value(self, value: Any) -> None:
        """Keep another optimizer in place of this one."""
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
        """Collective. Take rank 0's state, and keep this worker's residuals. The next step connects to the group."""
        reducer = self.value._reducer
        if reducer.exchange.world is not None and reducer.exchange.world is workers.world():
            workers.renew()
            reducer.leave()
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()
