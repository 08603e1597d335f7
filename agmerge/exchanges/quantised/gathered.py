# SPDX-License-Identifier: Apache-2.0
"""Quantised all-reduce in one phase: every rank reads the messages of all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agmerge.backends import Handle
from agmerge.exchanges.all_reduce import sum_in_rank_order
from agmerge.exchanges.base import ExchangeContext, InFlight, Noise
from agmerge.exchanges.message.format import RoundHeader
from agmerge.exchanges.quantised.exchange import QuantisedExchange, State, quantised_slots, refuse_damaged
from agmerge.exchanges.quantised.layout import MessageLayout
from agmerge.tensors.layout import Segment, Slot


class GatheredExchange(QuantisedExchange):
    """All-gather of quantised gradients, among two ranks or with error feedback: one hop, and one quantisation."""

    def __init__(self, context: ExchangeContext) -> None:
        super().__init__(context, shards=1)

    def _send(self, name: str, layout: MessageLayout, message: Tensor) -> tuple[Handle, Tensor]:
        received = self.keep(("received", name), self.comm.size * layout.size, torch.uint8, message.device)
        return self.comm.all_gather(received, message, name), received

    def wait(self, pending: InFlight) -> RoundHeader:
        """Collective. Wait for all messages, and return the merged header.

        Raises :class:`agmerge.MessageError`, the same on every rank, for a message that has changed on its way.
        """
        pending.handle.wait(self.timeout)
        return self._checked(pending, pending.received.view(self.comm.size, -1))

    def wait_on_stream(self, pending: InFlight) -> None:
        """Collective. Make the device's stream wait for all messages."""
        pending.handle.wait_on_stream(self.timeout)
        rows = pending.received.view(self.comm.size, -1)
        pending.said.append(rows[:, : pending.extra.layout.first[0].announced])

    def read(self, pending: InFlight, said: Sequence[Tensor]) -> RoundHeader:
        """Check what all ranks have announced, and return the merged header."""
        return self._checked(pending, said[0], sealed=False)

    def _checked(self, pending: InFlight, rows: Tensor, *, sealed: bool | None = None) -> RoundHeader:
        """Return the merged header of all messages, ``rows``; see :meth:`wait` and ``ShardLayout``."""
        state: State = pending.extra
        shard = state.layout.first[0]
        control = shard.header.read_headers(rows, pending.control, pending.name, sealed=sealed)
        refuse_damaged(pending.name, self._damaged(shard, rows, pending, sealed=sealed))
        state.squares = sum_in_rank_order(shard.squares(rows).view(-1, 1))  # each rank adds: processors must agree
        return control

    def finish(self, pending: InFlight) -> None:
        shard, rows = pending.extra.layout.first[0], pending.received.view(self.comm.size, -1)
        self._decode(pending, shard.table, [piece for piece, _ in shard.records], rows, 0, self.scale)
        update_of = {load.segment: load.update for load in pending.loads}
        for run, where in shard.plain:
            self._write_sum(run, rows[:, where], update_of[run.segment][run.start : run.stop])

    def noise(self, pending: InFlight) -> Noise | None:
        if self.context.feedback:  # the quantisation error is sent later: it is no noise
            return None
        return Noise(pending.extra.squares.clone(), self.quantiser.noise * self.scale**2, 0.0)


class AloneExchange(GatheredExchange):
    """Exchange of a rank alone: nothing is quantised, and an update is the gradient, to the bit."""

    def __init__(self, context: ExchangeContext) -> None:
        super().__init__(context)
        self._exact: dict[int, Tensor | None] = {}  # by slot: the work of a tensor, 1-D; None: it is zero

    def prepare(self, slot: Slot, work: Tensor | None, step: int) -> bool | None:
        """Note where the values of one tensor lie. Return None: they are not checked."""
        self._exact[slot.index] = None if work is None else work.view(-1)
        self._prepared.add(slot.index)
        return None

    def _encoded(self, segments: Sequence[Segment]) -> list[Slot]:
        return []

    def finish(self, pending: InFlight) -> None:
        for slot in quantised_slots([load.segment for load in pending.loads]):
            out, values = self._output(pending.extra, slot), self._exact.pop(slot.index, None)
            if values is None:
                out.zero_()
            elif out.data_ptr() != values.data_ptr():
                out.copy_(values)
            if self.scale != 1.0:  # between nodes, of which there is one
                out.mul_(self.scale)
            if self.context.feedback or self.store.has_residual:
                self.store.subtract_sent(Segment(slot.tensor_class, (slot,)), None, None)
        super().finish(pending)

    def noise(self, pending: InFlight) -> Noise | None:
        return None
