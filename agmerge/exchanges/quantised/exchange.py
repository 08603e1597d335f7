# SPDX-License-Identifier: Apache-2.0
"""Exchanges of gradients of which every element travels in few bits, in one phase or in two."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

import torch
from torch import Tensor

from agmerge.backends import Handle
from agmerge.errors import MessageError, NoAnswer
from agmerge.exchanges.base import (
    AHEAD,
    Exchange,
    ExchangeContext,
    InFlight,
    Noise,
    ReadPiece,
    SegmentBuffers,
    wait_for,
)
from agmerge.exchanges.dense import sum_in_rank_order, write_in_rank_order
from agmerge.exchanges.message.format import Flag, Format, RoundHeader
from agmerge.exchanges.quantised.layout import (
    MessageLayout,
    Piece,
    Run,
    ShardLayout,
    cut_blocks,
    cut_plain,
    fragment_of,
    number_of,
)
from agmerge.tensors.arena import Difference, as_tensor
from agmerge.tensors.layout import Segment, Slot
from sparsifiers import Kind, Quantiser, Selection
from sparsifiers.gpu.tables import BlockTable
from sparsifiers.quantising.draws import Draws, key_of, key_within

SEED = 0  # of all random words: two runs of one command draw the same ones


@dataclass
class State:
    """State of a message under way: its ``extra``."""

    layout: MessageLayout
    squares: Tensor  # float64[1]: of all quantised elements that this rank sends
    # By slot: where to write the update of a tensor that was not prepared; the others': see Store.update_of.
    outputs: dict[int, Tensor] = field(default_factory=dict)
    sums: Tensor | None = None  # uint8[W * longest]: the second phase, by owner; None: not begun


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
        self._waiting: dict[str, dict[int, tuple[Slot, Values]]] = {}
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

    def prepare(self, slot: Slot, work: Tensor | Difference | None, step: int) -> bool | None:
        """Quantise one tensor into its message; on a device, note it. Return whether it is finite; None: not checked.

        On a device ``work`` is to stay as it is until the message has left.
        """
        name, place = self._places[slot.index]
        values = _flat(work)
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
        values = [_part(waiting[piece.slot.index][1], piece.elements) for piece in pieces]
        message = self._messages[name]
        self.quantiser.encode_all(table, values, self._key(None, step, 0, self.comm.rank), message, squares)
        for slot, given in waiting.values():
            self._prepared.add(slot.index)
            self._commit(slot, given, step, message)
        return squares[0]

    def _encode(self, slot: Slot, values: Values, step: int, squares: Tensor) -> None:
        """Write the records of one tensor on the host, and its squares. ``values``: 1-D; None: zeros."""
        name, _ = self._places[slot.index]
        layout, message = self._layout(name, step), self._messages[name]
        if slot.index in self._prepared:  # in a round that came to nothing
            squares.zero_()
        key = self._key(slot, step, 0, self.comm.rank)
        for piece, where in layout.pieces_of.get(slot.index, ()):
            part = _part(values, piece.elements)
            if part is None:
                message[where] = 0
            else:
                self.quantiser.encode(part, piece.size, Draws(key, piece.first), message[where], squares)
        self._prepared.add(slot.index)
        self._commit(slot, values, step, message)

    def _commit(self, slot: Slot, values: Values, step: int, message: Tensor) -> None:
        """Tell the store what was written of a tensor."""
        if self.store.counts_zeros:
            self.store.count_zeros(slot, as_tensor(values))
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
            own = [self._key(None, pending.control.step, 0, self.comm.rank)]
            combined = self._reading("combined", layout.pieces, table, rows, keys, scale)
            sent = self._reading("own", layout.pieces, layout.table, pending.message.view(1, -1), own, self._factor)
            for piece, *reads in zip(layout.pieces, combined, sent, strict=True):
                self.store.take_piece(ReadPiece(piece.slot, piece.elements, *reads))
            return
        if self._fragments > 1:
            for slot in {piece.slot.index: piece.slot for piece in layout.pieces}.values():
                self._output(pending.extra, slot).zero_()
        outs = [self._output(pending.extra, piece.slot)[piece.elements] for piece in layout.pieces]
        self.quantiser.decode_all(table, rows, keys, scale, outs)

    def _reading(
        self, what: str, pieces: Sequence[Piece], table: BlockTable, rows: Tensor, keys: Sequence[int], scale: float
    ) -> Iterator[Callable[[], Tensor]]:
        """Yield functions that return the sum of each of ``pieces``, float32, 1-D: valid until the next is called.

        On the host each decodes its own piece, while that is in the cache; on a device all are decoded in one launch.
        """
        lengths = [piece.elements.stop - piece.elements.start for piece in pieces]
        if rows.device.type == "cpu":
            room = self.keep((what,), max(lengths, default=0), torch.float32, rows.device)
            for number, length in enumerate(lengths):
                yield partial(self._read, table.singles[number], rows, keys, scale, room[:length])
            return
        outs = torch.split(self.keep((what,), sum(lengths), torch.float32, rows.device), lengths)
        self.quantiser.decode_all(table, rows, keys, scale, outs)
        yield from (partial(Tensor.detach, out) for out in outs)

    def _read(self, table: BlockTable, rows: Tensor, keys: Sequence[int], scale: float, out: Tensor) -> Tensor:
        """Write the sum of one piece to ``out``, and return that."""
        self.quantiser.decode_all(table, rows, keys, scale, [out])
        return out

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


Values = Tensor | Difference | None  # of a tensor, 1-D; None: zeros


def _flat(work: Tensor | Difference | None) -> Values:
    """Return ``work`` in one dimension, in C order: of a difference views, or a new tensor."""
    if isinstance(work, Difference):
        if all(each.is_contiguous() for each in work):
            return Difference(work.minuend.view(-1), work.subtrahend.view(-1))
        work = work.tensor()
    return None if work is None else work.reshape(-1)


def _part(values: Values, elements: slice) -> Tensor | None:
    """Return some elements of 1-D ``values``: a view, or a new tensor of a difference."""
    if isinstance(values, Difference):
        return values.minuend[elements] - values.subtrahend[elements]
    return None if values is None else values[elements]


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

    def prepare(self, slot: Slot, work: Tensor | Difference | None, step: int) -> bool | None:
        """Note where the values of one tensor lie. Return None: they are not checked."""
        values = as_tensor(work)
        self._exact[slot.index] = None if values is None else values.reshape(-1)
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


# Two phases: each rank adds up its shard of all messages, and sends the mean to all.


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
