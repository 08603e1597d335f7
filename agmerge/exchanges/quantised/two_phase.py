# SPDX-License-Identifier: Apache-2.0
"""Exchange of quantised gradients in two phases: ranks add up shards of all messages, and send the means to all.

With error feedback an owner of a shard owes what quantising the mean has rounded, and adds it to the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from agmerge.backends import Handle
from agmerge.errors import MessageError, NoAnswer
from agmerge.exchanges.base import AHEAD, ExchangeContext, InFlight, Noise, SegmentBuffers, wait_for
from agmerge.exchanges.message.format import RoundHeader
from agmerge.exchanges.quantised.exchange import QuantisedExchange, State, copy_all, refuse_damaged
from agmerge.exchanges.quantised.layout import MessageLayout, ShardLayout
from sparsifiers import Selection


class TwoPhaseExchange(QuantisedExchange):
    """All-to-all of shards, then an all-gather of their means: a rank sends 2 (W-1)/W times its message.

    Each owner is sent its shard of all messages, adds them up in rank order, and quantises the mean once more; that is
    gathered. The second phase has a communicator of its own, ``ranks.second``, where all ranks call in plan order. It
    begins wherever arrivals are polled, as soon as the first one has ended; on devices when ``AHEAD`` later messages
    have left.

    Sources: Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023
    (arXiv 2306.10209); Li et al., "THC: Accelerating Distributed Deep Learning Using Tensor Homomorphic Compression",
    NSDI 2024.
    """

    two_phase = True

    def __init__(self, context: ExchangeContext) -> None:
        super().__init__(context, shards=context.ranks.comm.size)
        assert context.ranks.second is not None
        self._second = context.ranks.second
        self._first_phase: deque[InFlight] = deque()  # messages without a second phase so far, in plan order

    def start(
        self, name: str, loads: Sequence[SegmentBuffers], offers: Sequence[Selection | None], control: RoundHeader
    ) -> InFlight:
        """Collective. Send a message; tensors that were not prepared are quantised first."""
        if any(pending.name == name for pending in self._first_phase):
            # Of an attempt that came to nothing: other ranks may have started these second phases.
            self._add_up_all()
        pending = super().start(name, loads, offers, control)
        self._first_phase.append(pending)
        if pending.on_device:
            self.advance()
        return pending

    def _send(self, name: str, layout: MessageLayout, message: Tensor) -> tuple[Handle, Tensor]:
        splits = [shard.size for shard in layout.first]
        own = [splits[self.comm.rank]] * self.comm.size
        received = self.keep(("received", name), sum(own), torch.uint8, message.device)
        return self.comm.all_to_all(received, message, own, splits, name), received

    # -- owners add their shards up -----------------------------------------------------------------------------------

    def arrived(self, pending: InFlight) -> bool:
        """Collective. Return whether the exchange has ended; start second phases of which the first one has.

        Waits for nothing.
        """
        self.advance()
        return pending.extra.sums is not None and pending.handle.done()

    def advance(self) -> None:
        """Collective. Start second phases, in plan order, of which the first one has ended; on devices, see ``AHEAD``.

        There it does nothing but in :meth:`start`.
        """
        while self._first_phase and self._is_due(self._first_phase[0]):
            self._add_up_next()

    def _is_due(self, pending: InFlight) -> bool:
        return len(self._first_phase) > AHEAD if pending.on_device else pending.handle.done()

    def _add_up_all(self) -> None:
        """Collective. Start all second phases; the host waits for the first ones, or a device that has streams does."""
        try:
            while self._first_phase:
                self._add_up_next()
        except NoAnswer:  # an elastic group may end them with the results of others
            raise
        except BaseException:
            self._first_phase.clear()  # their second phases would be calls that other ranks do not make
            raise

    def _add_up_next(self) -> None:
        """Collective. Start the next second phase. After an error it is the next one still."""
        self._add_up(self._first_phase[0])
        self._first_phase.popleft()

    def _add_up(self, pending: InFlight) -> None:
        """Collective. Add up this rank's shard of a message after its first phase, and start the second one."""
        wait_for(pending.handle, self.timeout, on_stream=pending.has_streams)
        state: State = pending.extra
        rank, size, step = self.comm.rank, self.comm.size, pending.control.step
        shard, summed, longest = state.layout.first[rank], state.layout.second[rank], state.layout.longest
        rows = pending.received.view(size, -1)
        message = self.keep(("sum", pending.name), longest, torch.uint8, rows.device)
        keys, key = self._keys(step, 0, size), self._key(None, step, 1, 0)
        if self.context.feedback:
            self._encode_owing(shard, rows, keys, key, message)
        else:
            self.quantiser.encode_sum_all(shard.table, rows, keys, self.scale, self.quantiser, key, message)
        for (run, where), (_, out) in zip(shard.plain, summed.plain, strict=True):
            self._write_sum(run, rows[:, where], message[out].view(run.segment.tensor_class.dtype))
        if pending.has_streams:
            summed.merge_headers(message[: summed.size], rows, rank, key=key)
        else:
            control, fault = self._checked(shard, rows, pending)
            squares = shard.squares(rows).sum(dim=0, keepdim=True)  # in any order: the others read this rank's sum
            summed.write_header(message[: summed.size], control, fault=fault, key=key, squares=squares)
        state.sums = self.keep(("sums", pending.name), size * longest, torch.uint8, rows.device)
        pending.handle = self._second.all_gather(state.sums, message, f"{pending.name}/sum")
        pending.bytes += longest
        pending.codecs = self._codecs(pending.codecs, [summed], longest)

    def _encode_owing(self, shard: ShardLayout, rows: Tensor, keys: Sequence[int], key: int, message: Tensor) -> None:
        """Quantise this owner's sums and what it owes of earlier ones; what that rounds it owes from now on.

        That is error feedback of the second phase: with C the sum and what is owed, Q(C) is sent, and C - Q(C) owed.
        """
        for number, (piece, _) in enumerate(shard.records):
            table = shard.table.singles[number]
            owed = self.store.owed_of(piece.slot)[piece.elements]
            total, read = (self.keep((what,), len(owed), torch.float32, rows.device) for what in ("owing", "read"))
            self.quantiser.decode_all(table, rows, keys, self.scale * self._factor, [total])
            total.add_(owed)
            self.quantiser.encode_all(table, [total], key, message)
            self.quantiser.decode_all(table, message.view(1, -1), [key], self._factor, [read])
            self.store.owe(piece.slot, piece.elements, total - read)

    def _checked(self, shard: ShardLayout, rows: Tensor, pending: InFlight) -> tuple[RoundHeader, int]:
        """Return the merged header of the first phase, and 1 + the first rank of a damaged message, or 0.

        Raises nothing: the other ranks have to learn of the fault.
        """
        control = pending.control
        for sender in range(len(rows)):
            row = rows[sender : sender + 1]
            try:
                control = control.merged([control, shard.header.read_headers(row, pending.control, pending.name)])
            except MessageError:
                return pending.control, 1 + sender
        damaged = self._damaged(shard, rows, pending)
        return control, 1 + damaged[0] if damaged else 0

    # -- and updates come back ----------------------------------------------------------------------------------------

    def arrive(self, pending: InFlight, *, on_stream: bool = False) -> None:
        """Collective. Wait for a message. Starts all second phases first."""
        self._add_up_all()
        wait_for(pending.handle, self.timeout, on_stream=on_stream)

    def announced(self, pending: InFlight) -> list[Tensor]:
        rows = self._sums(pending)
        return [rows[:, : pending.extra.layout.second[0].announced] if pending.on_device else rows]

    def check(self, pending: InFlight, announced: Sequence[Tensor]) -> RoundHeader:
        """Return the merged header of what all owners have sent.

        Raises :class:`agmerge.MessageError`, the same on every rank, for a message that has changed on its way.
        """
        (rows,), sealed = announced, not pending.on_device
        state: State = pending.extra
        shards, key = state.layout.second, self._key(None, pending.control.step, 1, 0)
        damaged, faults = [], []
        for owner, shard in enumerate(shards):
            row = rows[owner : owner + 1]
            damaged += [owner] if shard.damaged(row, lambda _: key, sealed=sealed) else []
            faults += [fault - 1 for fault in shard.faults(row) if fault]
        if faults and not damaged:  # headers that do not belong together are told by who has sent them
            refuse_damaged(pending.name, faults)
        control = shards[0].header.read_headers(rows, pending.control, pending.name, sealed=sealed)
        refuse_damaged(pending.name, damaged)
        state.squares = shards[0].squares(rows[:1])
        return control

    def finish(self, pending: InFlight) -> None:
        update_of, places, sums = {load.segment: load.update for load in pending.loads}, list[Tensor](), list[Tensor]()
        layout: MessageLayout = pending.extra.layout
        self._decode(pending, layout.sums, self._sums(pending).view(1, -1), 1, self._factor)
        for shard, row in zip(layout.second, self._sums(pending), strict=True):
            for run, where in shard.plain:
                places.append(update_of[run.segment][run.start : run.stop])
                sums.append(row[where].view(run.segment.tensor_class.dtype))
        copy_all(places, sums)

    def noise(self, pending: InFlight) -> Noise:
        noise = self.quantiser.noise
        return Noise(pending.extra.squares.clone(), noise * self.scale**2, noise)

    def _sums(self, pending: InFlight) -> Tensor:
        """Return what owners have sent: uint8[W, longest]."""
        sums = pending.extra.sums
        assert sums is not None
        rows: Tensor = sums.view(self.comm.size, -1)
        return rows
