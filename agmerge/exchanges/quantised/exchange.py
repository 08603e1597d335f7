"""Average gradients of which every element travels in few bits: the quantised all-reduce."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from agmerge.backends import Handle
from agmerge.errors import MessageError
from agmerge.exchanges.all_reduce import in_rank_order
from agmerge.exchanges.base import Exchange, ExchangeContext, InFlight, Noise, SegmentBuffers
from agmerge.exchanges.message.format import Flag, Format, RoundHeader
from agmerge.exchanges.quantised.layout import MessageLayout, ShardLayout
from agmerge.exchanges.quantised.shards import Run, cut_blocks, cut_plain
from agmerge.tensors.layout import Segment, Slot
from sparsifiers import Kind, Selection
from sparsifiers.quantising.draws import Draws, key_of, mixed

SEED = 0  # of all random words: two runs of one command draw the same ones
GATHERED = 2  # workers up to which messages are gathered as they are: the same bytes as by shards, and one hop


@dataclass
class State:
    """State of a message under way: its ``extra``."""

    layout: MessageLayout
    squares: Tensor  # float64[1]: of all quantised elements that this rank sends
    # By slot: where to write the update of a tensor that was not prepared; the others': see ExchangeContext.update_of.
    outputs: dict[int, Tensor] = field(default_factory=dict)
    sums: Tensor | None = None  # uint8[W * longest]: the second phase, by owner; None: not begun


class QuantisedExchange(Exchange):
    """All-reduce of quantised gradients.

    Among two ranks, and with error feedback, messages are gathered, and each rank reads all of them. Among more
    there are two phases, so that a rank sends 2 (W-1)/W times its message, whatever W is: each owner is sent its shard
    of all messages, adds them up in rank order, and quantises the mean once more; that is gathered. The second
    phase has a communicator of its own, on which all ranks call in plan order. It begins wherever arrivals are polled,
    as soon as the first one has ended.

    Alone, nothing is quantised: the update is the gradient, to the bit.

    Tensors are quantised in :meth:`prepare`, as soon as each is complete, and updates are written where
    ``context.update_of`` says, so that no memory of their size is needed. Dense segments travel as they are, and are
    added up by the owner of each shard.

    Sources: two phases: Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training",
    2023 (arXiv 2306.10209); Li et al., "THC: Accelerating Distributed Deep Learning Using Tensor Homomorphic
    Compression", NSDI 2024.
    """

    sparse = False
    prepares = Kind.QUANTISED

    def __init__(self, context: ExchangeContext) -> None:
        super().__init__(context)
        assert context.quantiser is not None
        self.quantiser = context.quantiser
        self.gathers = self.comm.size <= GATHERED or context.feedback or context.second is None
        self._layouts: dict[str, MessageLayout] = {}  # by message
        self._message_of: dict[int, str] = {}  # by slot: the message that a tensor goes with
        self._squares: dict[int, Tensor] = {}  # by slot, of tensors that were prepared: float64[1]
        self._exact: dict[int, Tensor | None] = {}  # by slot: of a rank alone, the work that it has prepared, 1-D
        self._first_phase: deque[InFlight] = deque()  # messages without a second phase so far, in plan order

    # -- 1. tensors are quantised -------------------------------------------------------------------------------------

    def expect(self, name: str, segments: Sequence[Segment]) -> None:
        """Learn which segments message ``name`` will have: their tensors may be prepared before it starts."""
        self._layouts[name] = self._laid_out(segments)
        for slot in _quantised(segments):
            self._message_of[slot.index] = name

    def prepare(self, slot: Slot, work: Tensor | None, step: int) -> bool | None:
        """Quantise one tensor into its message. Return whether it is finite; None: not checked."""
        squares = self._encode(self._message_of[slot.index], slot, None if work is None else work.view(-1), step)
        self._squares[slot.index] = squares
        looked = squares.device.type == "cpu" and self.comm.size > 1
        return math.isfinite(squares.item()) if looked else None

    def _encode(self, name: str, slot: Slot, values: Tensor | None, step: int) -> Tensor:
        """Write the records of one tensor, and return its squares, float64[1]. ``values``: 1-D; None: zeros."""
        layout = self._layouts[name]
        message = self._message(name, layout, slot.lane.device)
        squares = torch.zeros(1, dtype=torch.float64, device=message.device)
        if self.comm.size == 1:
            self._exact[slot.index] = values
            return squares
        key = self._key(slot, step, 0, self.comm.rank)
        for piece, where in layout.pieces_of[slot.index]:
            if values is None:
                message[where] = 0
            else:
                own = Draws(key, piece.first)
                self.quantiser.encode(values[piece.elements], piece.size, own, message[where], squares)
        if self.context.feedback and values is not None:
            sent = self.keep(("sent",), slot.numel, slot.lane.storage, message.device)
            for piece, where in layout.pieces_of[slot.index]:
                draws = [Draws(key, piece.first)]
                self.quantiser.decode_sum([message[where]], draws, piece.size, 1.0, sent[piece.elements])
            self.commit(Segment(slot.lane, (slot,)), None, sent)
        elif self.context.has_rest:
            self.commit(Segment(slot.lane, (slot,)), None, None)
        return squares

    # -- 2. messages leave --------------------------------------------------------------------------------------------

    def start(
        self, name: str, loads: Sequence[SegmentBuffers], offers: Sequence[Selection | None], control: RoundHeader
    ) -> InFlight:
        """Collective. Send a message; tensors that were not prepared are quantised first."""
        self._finish_stale(name)
        segments = [load.segment for load in loads]
        if name not in self._layouts or self._layouts[name].first[0].header.segments != segments:
            self.expect(name, segments)
        layout, device = self._layouts[name], loads[0].work.device
        message, state = self._message(name, layout, device), State(layout, torch.zeros(1, dtype=torch.float64))
        state.squares = state.squares.to(device)
        if not control.flags & Flag.REPLAN:
            for load in loads:
                for slot in _quantised([load.segment]):
                    squares = self._squares.pop(slot.index, None)
                    if squares is None:
                        inside = slice(slot.offset - load.segment.start, slot.offset - load.segment.start + slot.numel)
                        squares = self._encode(name, slot, load.work[inside], control.step)
                        state.outputs[slot.index] = load.update[inside]
                    state.squares += squares
        self._write_plain(layout, loads, message)
        for number, shard in enumerate(layout.first):
            key = self._key(None, control.step, 0, self.comm.rank)
            part = layout.shard(message, number)
            shard.write_header(part, control, fault=0, key=key, squares=state.squares)
        handle, received = self._send(name, layout, message)
        elements = sum(load.segment.numel for load in loads)
        pending = InFlight(
            name, loads, control, handle, layout.size, elements, message, received, state,
            codecs=self._codecs({}, layout.first, layout.size),
        )  # fmt: skip
        if not self.gathers:
            self._first_phase.append(pending)
        return pending

    def _send(self, name: str, layout: MessageLayout, message: Tensor) -> tuple[Handle, Tensor]:
        """Collective. Start the first phase; return its handle, and where its bytes will be."""
        size = self.comm.size
        if self.gathers:
            received = self.keep(("received", name), size * layout.size, torch.uint8, message.device)
            return self.comm.all_gather(received, message, name), received
        splits = [shard.size for shard in layout.first]
        own = [splits[self.comm.rank]] * size
        received = self.keep(("received", name), sum(own), torch.uint8, message.device)
        return self.comm.all_to_all(received, message, own, splits, name), received

    def _write_plain(self, layout: MessageLayout, loads: Sequence[SegmentBuffers], message: Tensor) -> None:
        """Copy dense segments into the message; commit them, where they have a residual."""
        work_of = {load.segment: load.work for load in loads}
        for number, shard in enumerate(layout.first):
            part = layout.shard(message, number)
            for run, where in shard.plain:
                part[where].view(run.segment.lane.dtype).copy_(work_of[run.segment][run.start : run.stop])
        for load in loads:
            if load.segment.lane.kind is not Kind.QUANTISED and self.context.has_rest:
                self.commit(load.segment, None, load.work.to(load.segment.lane.dtype))

    # -- 3. owners add their shards up --------------------------------------------------------------------------------

    @property
    def can_poll(self) -> bool:
        return True

    def arrived(self, pending: InFlight) -> bool:
        """Collective. Return whether the exchange has ended; start second phases of which the first one has.

        Waits for nothing.
        """
        self.advance()
        return (self.gathers or pending.extra.sums is not None) and pending.handle.done()

    def advance(self) -> None:
        """Collective. Start second phases, in plan order, of which the first one has ended."""
        while self._first_phase and self._first_phase[0].handle.done():
            self._add_up(self._first_phase.popleft())

    def _add_up(self, pending: InFlight) -> None:
        """Collective. Add up this rank's shard of a message after its first phase, and start the second one."""
        pending.handle.wait(self.timeout)
        state: State = pending.extra
        assert self.context.second is not None
        rank, size = self.comm.rank, self.comm.size
        shard, summed = state.layout.first[rank], state.layout.second[rank]
        rows = pending.received.view(size, -1)
        control, fault = self._checked(shard, rows, pending)
        squares = in_rank_order(shard.squares(rows).view(-1, 1))
        longest = state.layout.longest
        message = self.keep(("sum", pending.name), longest, torch.uint8, rows.device)
        step = pending.control.step
        for (piece, where), (_, out) in zip(shard.records, summed.records, strict=True):
            draws = [Draws(self._key(piece.slot, step, 0, sender), piece.first) for sender in range(size)]
            own = Draws(self._key(piece.slot, step, 1, 0), piece.first)
            self.quantiser.encode_sum(
                [row[where] for row in rows], draws, piece.size, self.scale, self.quantiser, own, message[out]
            )
        for (run, where), (_, out) in zip(shard.plain, summed.plain, strict=True):
            message[out].view(run.segment.lane.dtype).copy_(self._sum_of(run, rows[:, where]))
        key = self._key(None, step, 1, 0)
        summed.write_header(message[: summed.size], control, fault=fault, key=key, squares=squares)
        state.sums = self.keep(("sums", pending.name), size * longest, torch.uint8, rows.device)
        pending.handle = self.context.second.all_gather(state.sums, message, f"{pending.name}/sum")
        pending.bytes += longest
        pending.codecs = self._codecs(pending.codecs, [summed], longest)

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

    def _sum_of(self, run: Run, rows: Tensor) -> Tensor:
        """Return the scaled sum of plain values, from uint8[W, bytes], added in rank order."""
        dtype = run.segment.lane.dtype
        return in_rank_order(torch.stack([row.view(dtype) for row in rows])).mul_(self.scale)

    def _damaged(self, shard: ShardLayout, rows: Tensor, pending: InFlight) -> list[int]:
        """Return the ranks of which the message of the first phase has changed on its way."""
        return shard.damaged(rows, lambda sender: self._key(None, pending.control.step, 0, sender))

    def _finish_stale(self, name: str) -> None:
        """Collective. Start the second phases of an attempt that came to nothing: others may have started theirs."""
        if any(pending.name == name for pending in self._first_phase):
            while self._first_phase:
                self._add_up(self._first_phase.popleft())

    # -- 4. and updates come back -------------------------------------------------------------------------------------

    def wait(self, pending: InFlight) -> RoundHeader:
        """Collective. Wait for a message, and return the merged header. Starts all second phases first.

        Raises :class:`agmerge.MessageError`, the same on every rank, for a message that has changed on its way.
        """
        try:
            while self._first_phase:
                self._add_up(self._first_phase.popleft())
        except BaseException:
            self._first_phase.clear()  # their second phases would be calls that other ranks do not make
            raise
        pending.handle.wait(self.timeout)
        state: State = pending.extra
        if self.gathers:
            shard, rows = state.layout.first[0], pending.received.view(self.comm.size, -1)
            control = shard.header.read_headers(rows, pending.control, pending.name)
            _refuse(pending.name, self._damaged(shard, rows, pending))
            state.squares = in_rank_order(shard.squares(rows).view(-1, 1))
            return control
        assert state.sums is not None
        rows = state.sums.view(self.comm.size, -1)
        control = state.layout.second[0].header.read_headers(rows, pending.control, pending.name)
        key = self._key(None, pending.control.step, 1, 0)
        faults, damaged = [], []
        for owner, shard in enumerate(state.layout.second):
            row = rows[owner : owner + 1]
            damaged += [owner] if shard.damaged(row, lambda _: key) else []
            faults += [fault - 1 for fault in shard.faults(row) if fault]
        _refuse(pending.name, damaged or faults)
        state.squares = state.layout.second[0].squares(rows[:1])
        return control

    def finish(self, pending: InFlight) -> None:
        state: State = pending.extra
        step = pending.control.step
        if self.comm.size == 1:
            self._finish_alone(state, pending)
        if self.gathers:
            rows = pending.received.view(self.comm.size, -1)
            for piece, where in state.layout.first[0].records:
                draws = [Draws(self._key(piece.slot, step, 0, sender), piece.first) for sender in range(self.comm.size)]
                out = self._output(state, piece.slot)[piece.elements]
                self.quantiser.decode_sum([row[where] for row in rows], draws, piece.size, self.scale, out)
            self._finish_plain(pending, [(state.layout.first[0], rows)])
            return
        assert state.sums is not None
        owners = list(zip(state.layout.second, state.sums.view(self.comm.size, -1), strict=True))
        for shard, row in owners:
            for piece, where in shard.records:
                draws = [Draws(self._key(piece.slot, step, 1, 0), piece.first)]
                out = self._output(state, piece.slot)[piece.elements]
                self.quantiser.decode_sum([row[where]], draws, piece.size, 1.0, out)
        self._finish_plain(pending, [(shard, row[None]) for shard, row in owners])

    def _finish_alone(self, state: State, pending: InFlight) -> None:
        """Write the updates of quantised tensors where there is one rank alone."""
        for slot in _quantised([load.segment for load in pending.loads]):
            out, values = self._output(state, slot), self._exact.pop(slot.index, None)
            if values is None:
                out.zero_()
            elif out.data_ptr() != values.data_ptr():
                out.copy_(values)
            if self.scale != 1.0:  # between nodes, of which there is one
                out.mul_(self.scale)
            if self.context.feedback or self.context.has_rest:
                self.commit(Segment(slot.lane, (slot,)), None, None)

    def _finish_plain(self, pending: InFlight, shards: Sequence[tuple[ShardLayout, Tensor]]) -> None:
        """Write the updates of dense segments. ``shards``: each with its bytes that arrived, uint8[messages, bytes]."""
        update_of = {load.segment: load.update for load in pending.loads}
        for shard, rows in shards:
            for run, where in shard.plain:
                part = rows[:, where]
                total = self._sum_of(run, part) if self.gathers else part[0].view(run.segment.lane.dtype)
                update_of[run.segment][run.start : run.stop].copy_(total)

    def _output(self, state: State, slot: Slot) -> Tensor:
        """Return where the update of a tensor is written: 1-D."""
        known = state.outputs.get(slot.index)
        if known is None:
            known = state.outputs[slot.index] = self.context.update_of(slot).view(-1)
        return known

    def noise(self, pending: InFlight) -> Noise | None:
        if self.comm.size == 1 or self.context.feedback:  # the quantisation error is sent later: it is no noise
            return None
        noise, state = self.quantiser.noise, pending.extra
        return Noise(state.squares.clone(), noise * self.scale**2, 0.0 if self.gathers else noise)

    # -- layouts and keys ---------------------------------------------------------------------------------------------

    def _laid_out(self, segments: Sequence[Segment]) -> MessageLayout:
        """Return the layout of a message of these segments."""
        slots = _quantised(segments)
        plain = [segment for segment in segments if segment.lane.kind is not Kind.QUANTISED]
        header = Format(segments, [0 if segment.lane.kind is Kind.QUANTISED else None for segment in segments])
        shards = 1 if self.gathers else self.comm.size
        slots = slots if self.comm.size > 1 else []
        cut = list(zip(cut_blocks(slots, shards), cut_plain(plain, shards), strict=True))
        first = [ShardLayout(header, pieces, runs, self.quantiser.record_bytes) for pieces, runs in cut]
        return MessageLayout(first, [] if self.gathers else first)

    def _message(self, name: str, layout: MessageLayout, device: torch.device) -> Tensor:
        """Return the bytes of a message that this rank sends: the same ones at every step."""
        return self.keep(("message", name), layout.size, torch.uint8, device)

    def _codecs(self, before: Mapping[str, int], shards: Sequence[ShardLayout], size: int) -> dict[str, int]:
        """Return ``before``, bytes by codec, with those of ``shards`` added, which have ``size`` bytes in all."""
        records = sum(where.stop - where.start for shard in shards for _, where in shard.records)
        plain = sum(where.stop - where.start for shard in shards for _, where in shard.plain)
        found = {self.quantiser.name: records, "plain": plain, "header": size - records - plain}
        return {what: before.get(what, 0) + count for what, count in found.items()}

    def _key(self, slot: Slot | None, step: int, phase: int, sender: int) -> int:
        """Return the key of the random words of a tensor; None: the key of its message, without a tensor.

        In the second phase ``sender`` is 0: words do not depend on the owner of a block. Shards of a tensor, which lie
        on the places of a node, have words of their own.
        """
        key = _key_of_message(SEED, step, phase, sender, self.context.place)
        return key if slot is None else mixed(key ^ number_of(slot.name))


@lru_cache(maxsize=1 << 10)
def _key_of_message(seed: int, step: int, phase: int, sender: int, place: int) -> int:
    return key_of(seed, step, phase, sender, *([place] if place else []))


@lru_cache(maxsize=1 << 16)
def number_of(name: str) -> int:
    """Return a number of 64 bits for the name of a tensor: the same whatever other tensors there are."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _quantised(segments: Sequence[Segment]) -> list[Slot]:
    """Return the tensors of ``segments`` that are quantised."""
    return [slot for segment in segments if segment.lane.kind is Kind.QUANTISED for slot in segment.slots]


def _refuse(name: str, ranks: Sequence[int]) -> None:
    """Raise :class:`agmerge.MessageError` that names ``ranks``, of damaged messages; nothing if there are none."""
    if ranks:
        raise MessageError(
            f"{name}: what ranks {sorted(set(ranks))} sent has changed on its way, its checksum is wrong: look at the "
            "network, the memory and the drivers of their machines. Nothing of it was used"
        )
