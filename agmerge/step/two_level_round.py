# SPDX-License-Identifier: Apache-2.0
"""Attempt at a step in which nodes exchange shards of their sums, and not the gradients of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from agmerge.exchanges import Noise
from agmerge.exchanges.base import AHEAD
from agmerge.exchanges.dense import sum_in_rank_order
from agmerge.exchanges.message.format import Flag, RoundHeader
from agmerge.exchanges.node_shards import NodeShards
from agmerge.metrics.step_times import Event
from agmerge.metrics.totals import Totals
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.step.round import GradientOf, Round
from agmerge.tensors.arena import Difference, as_tensor
from agmerge.tensors.layout import Slot
from agmerge.tensors.nonfinite import is_finite
from sparsifiers.memories import Alongside


class TwoLevelRound(Round):
    """Round with one stage inside each node before accumulation.

    A complete merge buffer is summed inside the node; when that sum has arrived, each rank accumulates its shards,
    selects from them and sends them to its peers on the other nodes. Arrivals are checked at every gradient and waited
    for at the end, in plan order on each of the two communicators. On devices the order is one for both: a sum is
    waited for when ``AHEAD`` later ones are under way. Not overlapped: the updates of a node's shards are gathered once
    all of them have arrived.

    A rank with another membership makes its whole node dirty: its gradients are in the node's sums. A rank that has
    found an infinity or NaN announces it to its node, and each rank of the node to the other nodes. Where finite
    gradients overflow in a node's sum, its ranks cannot tell each other any more: that is sent, and not kept.
    """

    def __init__(self, buffers: MergeBuffers, step: int, totals: Totals, **options: Any) -> None:
        """Store the arguments of :class:`Round`, without ``due``: a node adds up all of its merge buffers."""
        super().__init__(buffers, step, totals, **options)
        assert self.is_complete
        assert isinstance(buffers.flat.updates, NodeShards)
        self._shards = buffers.flat.updates
        self._on_device = any(slot.tensor_class.on_device for slot in buffers.layout.slots)
        self._summed: list[RoundHeader] = []  # by merge buffer: this rank's header in the node's sum
        self._overflowed: list[Slot] = []  # on the host, with a node sum that is not finite

    def _take(self, slot: Slot, gradient: torch.Tensor | Difference | None) -> None:
        own = as_tensor(gradient)
        good = own is None or not self.guard.inspect(slot, own)
        self._shards.put(slot, own if good and not self.dirty else None)

    def _take_and_move(self, slot: Slot, gradient: torch.Tensor) -> torch.Tensor:
        self._take(slot, gradient)
        return self._shards.set_aside(slot, gradient)

    def add_all(self, gradient_of: GradientOf) -> None:
        """Collective. Accumulate the missing tensors as :meth:`Round.add_all` does; pass on all sums of the node."""
        super().add_all(gradient_of)
        while len(self._under_way.sent) < len(self._summed):
            self._pass_on()

    def _send_complete(self, slot: Slot) -> None:
        while (buffer := len(self._summed)) < len(self._missing) and self._missing[buffer] == 0:
            used = tuple(self._added[slot.index] for slot in self._slots(buffer))
            header = self._header(buffer, used, self.buffers.layout.slots[0].tensor_class.device)
            self.recorder.note((Event.REACHED, buffer, self.recorder.now()))
            self.totals.sent(self._shards.start(buffer, header), 0)
            self._summed.append(header)
            self._pass_on_due()
        self._pass_on_due()

    def _pass_on_due(self) -> None:
        """Pass on the sums of the node that have arrived; on devices, where so many later ones are under way."""
        sent = self._under_way.sent
        while len(sent) < len(self._summed) and (
            len(self._summed) - len(sent) > AHEAD if self._on_device else self._shards.arrived(len(sent))
        ):
            self._pass_on()

    def _pass_on(self) -> None:
        """Take the node's sum of the next merge buffer, waiting for it if need be: accumulate, select, send."""
        buffer = len(self._under_way.sent)
        header = self._shards.wait(buffer, self._summed[buffer])
        self.dirty = self.dirty or bool(header.flags & Flag.REPLAN)
        self.flags |= header.flags & ~(Flag.REPLAN | Flag.NONFINITE)  # between nodes it has the flags of its node
        if header.flags & Flag.NONFINITE:
            self.guard.peer_found()
        for slot, used in zip(self._slots(buffer), header.used, strict=True):
            self._added[slot.index] = used
            if not self.dirty:
                self._accumulate_shard(slot, self._shards.shard(slot) if used else None)
                self._begin_message(slot)
        self._send(buffer)

    def _accumulate_shard(self, slot: Slot, shard: torch.Tensor | None) -> None:
        """Add this rank's shard of a node's sum to its residual; None: no rank of the node has a gradient."""
        arena = self.buffers.flat.arena_of[slot.index]
        finite = arena.accumulate(slot, shard, alongside=Alongside(notes=self._notes.get(slot.index)))
        if shard is None or not arena.memory.has_residual or shard.device.type != "cpu":
            return
        if finite is False or (finite is None and not is_finite(arena.work_of(slot))):
            self._overflowed.append(slot)

    def receive(self, gradient_of: GradientOf) -> bool:
        """Collective. Receive as :meth:`Round.receive` does, then set infinities that are to be kept to 0."""
        agreed = super().receive(gradient_of)
        if agreed and not self.nonfinite:
            if self.noises:
                self.noises = self._of_all_shards(self.noises)
            for arena in self.buffers.flat.arenas.values():
                # A device is not asked first. The momentum of an average is equal on all ranks, and so are the elements
                # that are set to 0 in it.
                if arena.work.device.type != "cpu" or arena.memory.averages:
                    arena.drop_nonfinite()
            for slot in self._overflowed:
                self.buffers.flat.arena_of[slot.index].drop_nonfinite(slot)
        return agreed

    def _of_all_shards(self, noises: Sequence[Noise]) -> list[Noise]:
        """Collective. Return the noise of all shards of this node, added up from that of each rank's own shard."""
        own = sum_in_rank_order(torch.stack([noise.squares for noise in noises]))
        squares, size = self._shards.add_up(own)
        self.totals.sent(size, 0)
        return [replace(noises[0], squares=squares)]

    def _slots(self, buffer: int) -> tuple[Slot, ...]:
        start, stop = self.buffers.plan.bounds[buffer]
        return self.buffers.layout.slots[start:stop]
