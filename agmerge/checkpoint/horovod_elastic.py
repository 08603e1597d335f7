# SPDX-License-Identifier: Apache-2.0
"""Elastic training under ``horovod.torch.elastic``: its ``TorchState`` saves our optimizer by this file.

Horovod's own handler would make new workers step the optimizer before it broadcasts rank 0's state; a step of ours is a
collective that the others do not make. And residuals belong to their worker: surviving workers keep theirs, new ones
start from zero. With ``sync="updates"`` parameters and moments are a worker's own, too: newcomers get the shared
parameters, and rank 0's moments.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from agmerge.backends import horovod
from agmerge.checkpoint import rank_state
from agmerge.checkpoint.redistribute import displaced, displacements
from agmerge.engine.optimizer_group import load_state
from agmerge.runtime import workers
from agmerge.runtime.broadcast import broadcast_optimizer_state, broadcast_parameters
from agmerge.runtime.collectives import allgather_object, broadcast_object

UNSAVED = (
    "state.sync() on rank {rank}, {steps} steps after the last commit: with sync='updates', each worker has its own "
    "parameters, which Horovod has just overwritten with rank 0's. Call state.commit() instead of "
    "state.check_host_updates()."
)


def prepare(kind: type[torch.optim.Optimizer]) -> None:
    """Make ``TorchState(optimizer=...)`` save optimizers of ``kind`` by a :class:`TorchStateHandler`, if needed."""
    if workers.launched_elastic():
        horovod.register(kind, TorchStateHandler)


class Kept:
    """Object of a ``TorchState`` with a copy of its ``state_dict()``, made at each commit."""

    def __init__(self, value: Any) -> None:
        """Save ``value`` at once."""
        self.value = value
        self.save()

    def set_value(self, value: Any) -> None:
        """Replace the object by another one, and save that."""
        self.value = value
        self.save()

    def save(self) -> None:
        """Keep a copy of the state in this process."""
        self._saved = copy.deepcopy(self.value.state_dict())


class TorchStateHandler(Kept):
    """Handler of an optimizer in a ``TorchState``: ``save`` at a commit, residuals included, ``restore`` to it, and
    ``sync`` after a reset."""

    def restore(self) -> None:
        """Go back to the copy. The group has broken: nothing may be sent."""
        reducer, inner = self.value._reducer, dict(self._saved)
        reducer.leave()
        reducer.discard()
        rank_state.load(reducer, inner.pop(rank_state.SECTION), own=True)
        load_state(self.value._inner, inner)

    def sync(self) -> None:
        """Collective. Level this worker with rank 0. The next step connects to the group.

        ``sync="gradients"``: load rank 0's optimizer state, and keep this worker's residuals. ``sync="updates"``: take
        rank 0's shared parameters, and keep what this worker is ahead of them, and its optimizer state; a newcomer has
        rank 0's. Raises ``ValueError`` on every rank where one has stepped since it was saved, with ``sync="updates"``.
        """
        reducer = self.value._reducer
        if reducer.exchange.group.world is not None and reducer.exchange.group.world is workers.world():
            workers.renew()
            reducer.leave()
        if reducer.combines_gradients:
            broadcast_optimizer_state(self.value, root_rank=0)
        else:
            self._sync_updates(self._saved)
        self.save()

    def _sync_updates(self, saved: dict[str, Any]) -> None:
        """Collective. Level this worker with rank 0; ``saved``: its state of the last commit.

        Horovod has already overwritten the parameters, each worker's own, with rank 0's.
        """
        reducer, section = self.value._reducer, saved[rank_state.SECTION]
        since = allgather_object(reducer.replica.steps - section["updates"]["steps"])
        for rank, steps in enumerate(since):
            if steps:
                raise ValueError(UNSAVED.format(rank=rank, steps=steps))
        inner = {key: value for key, value in saved.items() if key != rank_state.SECTION}
        is_newcomer = not section["updates"]["base"]
        broadcast_optimizer_state(self.value, root_rank=0)
        homes = {member.name: member.local.device for member in reducer.members.active()}
        updates = _levelled(section["updates"], section["residuals"], homes)
        reducer.leave()
        reducer.discard()
        rank_state.load(reducer, {**section, "updates": updates}, own=True)
        if not is_newcomer:
            load_state(self.value._inner, inner)


def _levelled(
    updates: Mapping[str, Any], residuals: Mapping[str, torch.Tensor], homes: Mapping[str, torch.device]
) -> dict[str, Any]:
    """Collective. Return ``updates`` with rank 0's steps, outer optimizer and shared parameters.

    If a message of rank 0's was under way all send that again, so that all make the same calls. A newcomer also takes
    what rank 0 has measured for moments.
    Where one of these differs, by a commit that this worker or rank 0 alone has made, its parameters are as far ahead
    of rank 0's as they were of its own. ``updates``: a result of ``LocalReplica.saved``; ``residuals``: its worker's;
    ``homes``: devices of its parameters, by name.
    """
    base = updates["base"]
    forms = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in base.items()}
    common = {key: updates[key] for key in ("steps", "outer", "under_way")}
    forms, common, moments = broadcast_object((forms, common, updates.get("moments")))
    shared = {name: torch.empty(shape, dtype=dtype, device=homes[name]) for name, (shape, dtype) in forms.items()}
    for name in shared.keys() & base.keys():
        shared[name].copy_(base[name])
    broadcast_parameters(shared)
    levelled = {**updates, **common, "base": shared}
    if not all(name in base and torch.equal(shared[name], base[name]) for name in shared):
        levelled = {**displaced(levelled, displacements(updates, residuals)), "under_way": common["under_way"]}
    return levelled if base or moments is None else {**levelled, "moments": moments}
