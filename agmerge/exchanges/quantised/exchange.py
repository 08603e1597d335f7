# SPDX-License-Identifier: Apache-2.0
"""Exchanges of gradients of which every element travels in few bits; those in which all ranks read all messages."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from agmerge.backends import Handle
from agmerge.errors import MessageError
from agmerge.exchanges.base import (
    ArrivedPieces,
    Exchange,
    ExchangeContext,
    InFlight,
    Noise,
    SegmentBuffers,
    wait_for,
)
from agmerge.exchanges.dense import sum_in_rank_order, write_in_rank_order
from agmerge.exchanges.message.format import Flag, Format, RoundHeader
from agmerge.exchanges.quantised.layout import (
    MessageLayout,
    Run,
    ShardLayout,
    cut_blocks,
    cut_plain,
    fragment_of,
    number_of,
)
from agmerge.tensors.arena import Difference
from agmerge.tensors.layout import Segment, Slot
from sparsifiers import Kind, Quantiser, Selection
from sparsifiers.gpu.tables import BlockTable
from sparsifiers.quantising.draws import Draws, key_of, key_within
from sparsifiers.quantising.moving import Arrived

SEED = 0  # of all random words: two runs of one command draw the same ones


@dataclass
class State:
    """State of a message under way: its ``extra``."""

    layout: MessageLayout
    squares: Tensor  # float64[1]: of all quantised elements that this rank sends
    # By slot: where to write the update of a tensor that was not prepared; the others': see Store.update_of.
    outputs: dict[int, Tensor] = field(default_factory=dict)
    sums: Tensor | None = None  # uint8[W * longest]: the second phase, by owner; None: not begun


class Values(NamedTuple):
    """Values of a tensor, 1-D in C order: ``minuend``, or what that is more than ``subtrahend``, of the same dtype."""

    minuend: Tensor
    subtrahend: Tensor | None = None

    def part(self, elements: slice) -> Tensor:
        """Return some of the values: a view, or a new tensor."""
        part = self.minuend[elements]
        return part if self.subtrahend is None else part - self.subtrahend[elements]


class QuantisedExchange(Exchange):
    """Message of quantised gradients: what the gathered and the two-phase all-reduce have in common.

    On the host tensors are quantised in :meth:`prepare`, as soon as each is complete; on devices in :meth:`complete`,
    all of a message in one launch. Updates are written where ``store.update_of`` says, so that no memory of their size
    is needed. Dense segments travel as they are, and are added up by the owner of each shard. ``shards``: into so many
    a message is cut, each with an owner.

    With ``context.fragments`` above 1 a message has the blocks of one fragment, in turn from step to step. With error
    feedback, values that an unbiased quantizer reads are multiplied by :func:`contraction`.
    """

    sparse = False
    prepares = Kind.QUANTISED
    overwrites = True
    queues = True

    def __init__(self, context: ExchangeContext, shards: int) -> None:
        super().__init__(context)
        assert context.quantiser is not None
        self.quantiser, self._shards = context.quantiser, shards
        self._fragments = context.fragments
        self._factor = contraction(self.quantiser) if context.feedback else 1.0  # of values read
        self._layouts: dict[tuple[str, int], MessageLayout] = {}  # by message and fragment
        self._messages: dict[str, Tensor] = {}  # by message: the bytes that this rank sends, the same at every step
        self._places: dict[int, tuple[str, int]] = {}  # by slot: the message of a tensor, and its place there
        self._prepared: set[int] = set()  # slots that have records in a message that has not started
        # By message and slot: tensors on devices that are to be quantised together, with their values, 1-D.
        self._waiting: dict[str, dict[int, tuple[Slot, Values | None]]] = {}
        # By message: float64[tensors], on devices float64[1], of all; 0 of those that have no records yet.
        self._squares: dict[str, Tensor] = {}

    # -- tensors are quantised ----------------------------------------------------------------------------------------

    def expect(self, name: str, segments: Sequence[Segment]) -> None:
        """Learn which segments message ``name`` will have: their tensors may be prepared before it starts."""
        layouts = [self._laid_out(segments, fragment) for fragment in range(self._fragments)]
        self._layouts |= {(name, fragment): layout for fragment, layout in enumerate(layouts)}
        slots, device = quantised_slots(segments), segments[0].tensor_class.device
        longest = max(layout.size for layout in layouts)
        self._messages[name] = self.keep(("message", name), longest, torch.uint8, device)
        length = len(slots) if device.type == "cpu" else 1
        self._squares[name] = self.keep(("squares", name), length, torch.float64, device).zero_()
        self._waiting[name] = {}
        for place, slot in enumerate(slots):
            self._places[slot.index] = (name, place)
            self._prepared.discard(slot.index)

    def _layout(self, name: str, step: int) -> MessageLayout:
        """Return the layout of message ``name`` at a step: that of the fragment whose turn it is."""
        return self._layouts[name, step % self._fragments]

    def prepare(self, slot: Slot, work: Tensor | None, step: int) -> bool | None:
        """Quantise one tensor into its message; on a device, note it. Return whether it is finite; None: not checked.

        On a device ``work`` is to stay as it is until the message has left.
        """
        return self._prepare(slot, None if work is None else Values(work.view(-1)), step)

    def prepare_difference(self, slot: Slot, work: Difference, step: int) -> bool | None:
        """Quantise one tensor as :meth:`prepare` does; only what is sent of it is computed."""
        if not all(each.is_contiguous() for each in work):
            return super().prepare_difference(slot, work, step)
        return self._prepare(slot, Values(work.minuend.view(-1), work.subtrahend.view(-1)), step)

    def _prepare(self, slot: Slot, values: Values | None, step: int) -> bool | None:
        name, place = self._places[slot.index]
        if slot.tensor_class.device.type != "cpu":
            self._waiting[name][slot.index] = slot, values
            return None
        squares = self._squares[name][place : place + 1]
        self._encode(slot, values, step, squares)
        return math.isfinite(squares.item())

    def complete(self, name: str, step: int) -> Tensor | None:
        """Quantise the noted tensors of message ``name``. Return their squares, 0-dim; None: there are none."""
        waiting, self._waiting[name] = self._waiting[name], {}
        if not waiting:
            return None
        layout, squares = self._layout(name, step), self._squares[name]
        if not self._prepared.isdisjoint(waiting):  # in a round that came to nothing
            squares.zero_()
        chosen = [number for number, piece in enumerate(layout.pieces) if piece.slot.index in waiting]
        table = layout.table if len(chosen) == len(layout.pieces) else layout.table.part(chosen)
        pieces = [layout.pieces[number] for number in chosen]
        given = [waiting[piece.slot.index][1] for piece in pieces]
        values = [None if of is None else of.part(piece.elements) for of, piece in zip(given, pieces, strict=True)]
        message = self._messages[name]
        self.quantiser.encode_all(table, values, self._key(None, step, 0, self.comm.rank), message, squares)
        for slot, own in waiting.values():
            self._prepared.add(slot.index)
            self._commit(slot, own, step, message)
        return squares[0]

    def _encode(self, slot: Slot, values: Values | None, step: int, squares: Tensor) -> None:
        """Write the records of one tensor on the host, and its squares."""
        name, _ = self._places[slot.index]
        layout, message = self._layout(name, step), self._messages[name]
        if slot.index in self._prepared:  # in a round that came to nothing
            squares.zero_()
        key = self._key(slot, step, 0, self.comm.rank)
        for piece, where in layout.pieces_of.get(slot.index, ()):
            if values is None:
                message[where] = 0
            else:
                draws, part = Draws(key, piece.first), values.minuend[piece.elements]
                if values.subtrahend is None:
                    self.quantiser.encode(part, piece.size, draws, message[where], squares)
                else:
                    less = values.subtrahend[piece.elements]
                    self.quantiser.encode_difference(part, less, piece.size, draws, message[where], squares)
        self._prepared.add(slot.index)
        self._commit(slot, values, step, message)

    def _commit(self, slot: Slot, values: Values | None, step: int, message: Tensor) -> None:
        """Tell the store what was written of a tensor."""
        if self.store.counts_zeros:
            self.store.count_zeros(slot, None if values is None else values.part(slice(0, slot.numel)))
        segment = Segment(slot.tensor_class, (slot,))
        if self.store.takes_pieces(slot):  # it hears of that with the sum, see :meth:`_decode`
            return
        if self.context.feedback and values is not None:
            sent = self.keep(("sent",), segment.length, slot.tensor_class.storage, message.device)
            sent.zero_()  # padding, and what is not in the fragment
            key = self._key(slot, step, 0, self.comm.rank)
            layout = self._layout(self._places[slot.index][0], step)
            for piece, where in layout.pieces_of.get(slot.index, ()):
                draws = [Draws(key, piece.first)]
                self.quantiser.decode_sum([message[where]], draws, piece.size, self._factor, sent[piece.elements])
            self.store.subtract_sent(segment, None, sent)
        elif self.store.has_residual:
            self.store.subtract_sent(segment, None, None)

    # -- messages leave -----------------------------------------------------------------------------------------------

    def start(
        self, name: str, loads: Sequence[SegmentBuffers], offers: Sequence[Selection | None], control: RoundHeader
    ) -> InFlight:
        """Collective. Send a message; tensors that were not prepared are quantised first."""
        segments = [load.segment for load in loads]
        if (name, 0) not in self._layouts or self._layouts[name, 0].first[0].header.segments != segments:
            self.expect(name, segments)
        layout, device = self._layout(name, control.step), loads[0].work.device
        message = self._messages[name][: layout.size]
        state = State(layout, self._squares[name])
        if not control.flags & Flag.REPLAN:
            for load in loads:
                for slot in quantised_slots([load.segment]):
                    if slot.index not in self._prepared and slot.index not in self._waiting[name]:
                        inside = slice(slot.offset - load.segment.start, slot.offset - load.segment.start + slot.numel)
                        self.prepare(slot, load.work[inside], control.step)
                        state.outputs[slot.index] = load.update[inside]
            self.complete(name, control.step)
            self._prepared.difference_update(slot.index for slot in quantised_slots([load.segment for load in loads]))
        if device.type == "cpu":
            state.squares = added_up(state.squares)
        if layout.has_plain:
            self._write_plain(layout, loads, message)
        key = self._key(None, control.step, 0, self.comm.rank)
        layout.write_headers(message, control, key=key, squares=state.squares)
        self._squares[name].zero_()
        handle, received = self._send(name, layout, message)
        elements = sum(load.segment.numel for load in loads)
        if self._fragments > 1:
            elements -= sum(slot.numel for slot in quantised_slots(segments)) - layout.elements
        return InFlight(
            name, loads, control, handle, layout.size, elements, message, received, state,
            codecs=self._codecs({}, layout.first, layout.size),
        )  # fmt: skip

    @abstractmethod
    def _send(self, name: str, layout: MessageLayout, message: Tensor) -> tuple[Handle, Tensor]:
        """Collective. Start the first collective; return its handle, and where its bytes will be, uint8."""

    def _write_plain(self, layout: MessageLayout, loads: Sequence[SegmentBuffers], message: Tensor) -> None:
        """Copy dense segments into the message; commit them, where they have a residual."""
        work_of, places, runs = {load.segment: load.work for load in loads}, list[Tensor](), list[Tensor]()
        for number, shard in enumerate(layout.first):
            part = layout.shard(message, number)
            for run, where in shard.plain:
                places.append(part[where].view(run.segment.tensor_class.dtype))
                runs.append(work_of[run.segment][run.start : run.stop])
        copy_all(places, runs)
        for load in loads:
            if load.segment.tensor_class.kind is not Kind.QUANTISED and self.store.has_residual:
                self.store.subtract_sent(load.segment, None, load.work.to(load.segment.tensor_class.dtype))

    # -- messages are read --------------------------------------------------------------------------------------------

    def _write_sum(self, run: Run, rows: Tensor, out: Tensor) -> None:
        """Write the scaled sum of plain values, from uint8[W, bytes], added in rank order, to ``out``."""
        write_in_rank_order(out, rows.view(run.segment.tensor_class.dtype), self.scale)

    def _damaged(self, shard: ShardLayout, rows: Tensor, pending: InFlight, *, sealed: bool | None = None) -> list[int]:
        """Return the ranks of which the message of the first phase has changed on its way; see ``ShardLayout``."""
        return shard.damaged(rows, lambda sender: self._key(None, pending.control.step, 0, sender), sealed=sealed)

    def _decode(self, pending: InFlight, table: BlockTable, rows: Tensor, phase: int, scale: float) -> None:
        """Write the updates of quantised tensors: of each piece of ``table`` the sum of ``rows`` times ``scale``.

        ``rows``: uint8[W, bytes], what each sender has sent. A store that takes pieces gets them instead.
        """
        layout: MessageLayout = pending.extra.layout
        keys = self._keys(pending.control.step, phase, len(rows))
        if any(self.store.takes_pieces(piece.slot) for piece in layout.pieces):
            key = self._key(None, pending.control.step, 0, self.comm.rank)
            own = self.comm.rank if phase == 0 else -1  # in the second phase rows are of owners
            sent = layout.table, pending.message, key, self._factor, own
            pieces = [(piece.slot, piece.elements) for piece in layout.pieces]
            self.store.take_pieces(ArrivedPieces(self.quantiser, pieces, Arrived(table, rows, keys, scale, *sent)))
            return
        if self._fragments > 1:  # also of small tensors that have no block in this fragment
            for slot in self._encoded([load.segment for load in pending.loads]):
                self._output(pending.extra, slot).zero_()
        outs = [self._output(pending.extra, piece.slot)[piece.elements] for piece in layout.pieces]
        self.quantiser.decode_all(table, rows, keys, scale, outs)

    def _keys(self, step: int, phase: int, senders: int) -> list[int]:
        """Return the keys of so many senders' messages, without a tensor."""
        return [self._key(None, step, phase, sender) for sender in range(senders)]

    def _output(self, state: State, slot: Slot) -> Tensor:
        """Return where the update of a tensor is written: 1-D."""
        known = state.outputs.get(slot.index)
        if known is None:
            known = state.outputs[slot.index] = self.store.update_of(slot).view(-1)
        return known

    # -- layouts and keys ---------------------------------------------------------------------------------------------

    def _laid_out(self, segments: Sequence[Segment], fragment: int) -> MessageLayout:
        """Return the layout of a message of one fragment of these segments."""
        pieces = fragment_of(self._encoded(segments), self._fragments, fragment)
        plain = [segment for segment in segments if segment.tensor_class.kind is not Kind.QUANTISED]
        header = Format(segments, [0 if segment.tensor_class.kind is Kind.QUANTISED else None for segment in segments])
        cut = zip(cut_blocks(pieces, self._shards), cut_plain(plain, self._shards), strict=True)
        first = [ShardLayout(header, pieces, runs, self.quantiser.record_bytes) for pieces, runs in cut]
        return MessageLayout(first, first if self._shards > 1 else [])

    def _encoded(self, segments: Sequence[Segment]) -> list[Slot]:
        """Return the tensors of ``segments`` that have records in a message."""
        return quantised_slots(segments)

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
        key = _key_of_message(SEED, step, phase, sender, self.context.ranks.place)
        return key if slot is None else key_within(key, number_of(slot.name))


@lru_cache(maxsize=1 << 10)
def _key_of_message(seed: int, step: int, phase: int, sender: int, place: int) -> int:
    return key_of(seed, step, phase, sender, *([place] if place else []))


def quantised_slots(segments: Sequence[Segment]) -> list[Slot]:
    """Return the tensors of ``segments`` that are quantised."""
    return [slot for segment in segments if segment.tensor_class.kind is Kind.QUANTISED for slot in segment.slots]


def copy_all(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy each of ``values`` to its place: on a device in one launch, or some."""
    if places:
        torch._foreach_copy_(list(places), list(values))


def added_up(squares: Tensor) -> Tensor:
    """Return the sum of float64 numbers on the host: float64[1], in their order, the same on all processors."""
    total = torch.zeros(1, dtype=torch.float64)
    for number in squares.tolist():
        total += number
    return total


def refuse_damaged(name: str, ranks: Sequence[int]) -> None:
    """Raise :class:`agmerge.MessageError` that names ``ranks``, of damaged messages; nothing if there are none."""
    if ranks:
        raise MessageError(
            f"AGM501: {name}: the messages of ranks {sorted(set(ranks))} were damaged in transit (wrong checksum) and "
            "were not used. Check the network, the memory and the drivers of their machines."
        )


def contraction(quantiser: Quantiser) -> float:
    """Return the factor of values read with which error feedback forgets least, in (0, 1].

    An unbiased quantizer of noise v, so that E|Q(x) - x|^2 = v |x|^2, leaves v / (1 + v) of the energy with the factor
    1 / (1 + v): less than v, and less than 1 for any v. For a biased one it is 1.
    """
    return 1.0 / (1.0 + quantiser.noise) if quantiser.unbiased else 1.0


# One phase: every rank reads the messages of all.


class GatheredExchange(QuantisedExchange):
    """All-gather of quantised gradients, among two ranks or with error feedback: one hop, and one quantisation."""

    def __init__(self, context: ExchangeContext) -> None:
        super().__init__(context, shards=1)

    def _send(self, name: str, layout: MessageLayout, message: Tensor) -> tuple[Handle, Tensor]:
        received = self.keep(("received", name), self.comm.size * layout.size, torch.uint8, message.device)
        return self.comm.all_gather(received, message, name), received

    def arrive(self, pending: InFlight, *, on_stream: bool = False) -> None:
        """Collective. Wait for all messages."""
        wait_for(pending.handle, self.timeout, on_stream=on_stream)

    def announced(self, pending: InFlight) -> list[Tensor]:
        rows = pending.received.view(self.comm.size, -1)
        return [rows[:, : pending.extra.layout.first[0].announced] if pending.on_device else rows]

    def check(self, pending: InFlight, announced: Sequence[Tensor]) -> RoundHeader:
        """Return the merged header of all messages.

        Raises :class:`agmerge.MessageError`, the same on every rank, for a message that has changed on its way.
        """
        state: State = pending.extra
        (rows,), sealed = announced, not pending.on_device
        shard = state.layout.first[0]
        control = shard.header.read_headers(rows, pending.control, pending.name, sealed=sealed)
        refuse_damaged(pending.name, self._damaged(shard, rows, pending, sealed=sealed))
        state.squares = sum_in_rank_order(shard.squares(rows).view(-1, 1))  # each rank adds: processors must agree
        return control

    def finish(self, pending: InFlight) -> None:
        shard, rows = pending.extra.layout.first[0], pending.received.view(self.comm.size, -1)
        self._decode(pending, shard.table, rows, 0, self.scale * self._factor)
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
