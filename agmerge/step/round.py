# SPDX-License-Identifier: Apache-2.0
"""Exchange of the gradients of one step, once: tensors in, messages out in plan order, updates back.

Until every message of the first merge buffer has arrived, nothing that a round writes is visible: gradients and
residuals are as they were, so a round can be discarded and repeated after a new agreement.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Sequence
from itertools import chain
from typing import cast

import torch

from agmerge.exchanges import InFlight, Noise, SegmentBuffers
from agmerge.exchanges.base import announced_on_host
from agmerge.exchanges.message.format import Flag, RoundHeader
from agmerge.exchanges.routing import Message
from agmerge.metrics.step_times import Clock, Event, StepRecorder
from agmerge.metrics.totals import Totals
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.tensors.arena import Add, Arena, Difference, accumulate_together, add_up, as_tensor
from agmerge.tensors.layout import Slot
from agmerge.tensors.nonfinite import KEEP, NonFiniteGuard, is_finite
from sparsifiers import Kind, Selection, Sparsifier
from sparsifiers.memories import Alongside

# Messages under way.

SentMessage = tuple[Message, InFlight]


class MessagesUnderWay:
    """Messages of a round, merge buffer by merge buffer, from their start to their updates.

    On devices that can wait for messages by themselves, the host queues all work on them with :meth:`queue`, and then
    waits once for their headers. Elsewhere :meth:`headers` waits for one merge buffer's messages after the other.
    """

    def __init__(self, buffers: MergeBuffers, totals: Totals, recorder: StepRecorder) -> None:
        self._buffers, self._totals = buffers, totals
        self._note, self._now = recorder.note, recorder.now
        self._counts_zeros = buffers.store.counts_zeros  # in this step
        # A device is far behind what the host sees: there an exchange ends when it is received.
        self._sees_ends = not recorder.clock.on_device
        self.sent: list[list[SentMessage]] = []  # per merge buffer; empty: it is not exchanged in this round
        self._waited: set[int] = set()  # by `id`: messages that devices wait for, or have
        self._arrived = 0  # merge buffers with messages that are known to have arrived
        self._announced: dict[int, list[torch.Tensor]] = {}  # by `id`, of queued messages: input of `Exchange.check`

    def start(
        self,
        message: Message,
        operands: Sequence[SegmentBuffers],
        selections: Sequence[Selection | None],
        header: RoundHeader,
    ) -> SentMessage:
        """Collective. Start one message."""
        if self._counts_zeros and not header.flags & Flag.REPLAN:
            self._count_zeros(message, operands)
        in_flight = message.exchange.start(message.name, operands, selections, header)
        self._totals.under_way[id(in_flight)] = in_flight
        return message, in_flight

    def _count_zeros(self, message: Message, operands: Sequence[SegmentBuffers]) -> None:
        """Count zeros of tensors that could be quantised, and go dense: exchanges in few bits count their own."""
        for load in operands if message.exchange.prepares is not Kind.QUANTISED else ():
            if load.segment.tensor_class.kind is Kind.QUANTISED:
                for slot in load.segment.slots:
                    start = slot.offset - load.segment.start
                    self._buffers.store.count_zeros(slot, load.work[start : start + slot.numel])

    def poll(self) -> None:
        """Collective. Record which messages have arrived: the ends of hidden exchanges could not be timed otherwise.

        Waits for nothing. Second phases of later merge buffers do not wait for earlier ones.
        """
        while self._arrived < len(self.sent):
            for message, in_flight in self.sent[self._arrived]:
                if not message.exchange.arrived(in_flight):
                    for exchange in self._buffers.two_phase:
                        exchange.advance()
                    return
            if self.sent[self._arrived] and self._sees_ends:
                self._note((Event.ARRIVED, self._arrived, self._now()))
            self._arrived += 1

    def queue(self, buffers: int, *, writes: bool) -> None:
        """Collective. Queue all device work on messages of the first so many merge buffers; wait for their headers.

        Of a merge buffer all messages are queued, or none is. ``writes``: their updates, too, but for exchanges that
        overwrite gradients. Should the round have to be repeated, its gradients do not lie where updates were written:
        see :meth:`Round.add`. Called again after an error, it leaves out what was queued before that.
        """
        queued = []
        for buffer, messages in enumerate(self.sent[:buffers]):
            if messages and all(message.exchange.can_queue(in_flight) for message, in_flight in messages):
                queued += messages
                left = [one for one in messages if id(one[1]) not in self._waited]
                if not left:
                    continue
                self._note((Event.REACHED, buffer, self._now()))
                for message, in_flight in left:
                    message.exchange.arrive(in_flight, on_stream=True)
                    self._waited.add(id(in_flight))
                self._note((Event.REACHED, buffer, self._now()))
                for message, in_flight in messages if writes else ():
                    if not message.exchange.overwrites:
                        message.exchange.finish(in_flight)
                self._note((Event.REACHED, buffer, self._now()))
        announced = [(in_flight, message.exchange.announced(in_flight)) for message, in_flight in queued]
        self._announced = announced_on_host(announced, self._buffers.config.guards.timeout)

    def headers(self, buffer: int) -> list[RoundHeader]:
        """Collective. Return the merged headers of a merge buffer's messages; wait for those that were not queued."""
        messages = self.sent[buffer]
        if self._is_queued(buffer):
            said = self._announced
            found = [message.exchange.check(in_flight, said[id(in_flight)]) for message, in_flight in messages]
        else:
            self._note((Event.REACHED, buffer, self._now()))
            found = [message.exchange.wait(in_flight) for message, in_flight in messages]
            self._note((Event.REACHED, buffer, self._now()))
        for _, in_flight in messages:  # all that it sends has left
            self._totals.arrived(in_flight)
        self.poll()
        return found

    def finish(self, buffer: int, *, writes: bool) -> list[Noise]:
        """Collective. Write the updates of a merge buffer's messages, if ``writes``; return their noise.

        Updates that were queued are left to devices.
        """
        noises, is_queued = [], self._is_queued(buffer)
        for message, in_flight in self.sent[buffer] if writes else ():
            if message.exchange.overwrites or not is_queued:
                message.exchange.finish(in_flight)
            noise = message.exchange.noise(in_flight)
            noises += [] if noise is None else [noise]
        if not is_queued:
            self._note((Event.REACHED, buffer, self._now()))
        self.poll()
        return noises

    def forget(self) -> None:
        """Count the messages that nobody will receive, and let go of them and of the memory that they refer to."""
        for _, in_flight in chain.from_iterable(self.sent):
            if id(in_flight) in self._totals.under_way:
                self._totals.arrived(in_flight)

    def _is_queued(self, buffer: int) -> bool:
        return id(self.sent[buffer][0][1]) in self._announced


# Gradients that wait for their merge buffer: a call each would cost too much for small tensors, and on devices.

Batch = list[tuple[Slot, "torch.Tensor | None"]]  # tensors of one class, with their gradients


class Batches:
    """Gradients of a round that wait until their merge buffer is complete, to be accumulated together."""

    def __init__(self, buffers: MergeBuffers, guard: NonFiniteGuard) -> None:
        self._buffers, self._guard = buffers, guard
        self._waiting: dict[int, dict[Arena, Batch]] = {}  # by merge buffer and arena: not yet in `work`
        self._read: list[torch.Tensor] = []  # gradients on devices, which are perhaps still to be read

    def hold(self, slot: Slot, gradient: torch.Tensor | None) -> None:
        """Keep a gradient until :meth:`accumulate` is called for its merge buffer; None: the tensor has none."""
        batches = self._waiting.setdefault(self._buffers.buffer_of[slot.index], {})
        batches.setdefault(self._buffers.flat.arena_of[slot.index], []).append((slot, gradient))

    def accumulate(self, buffer: int) -> None:
        """Write ``work = residual + gradient`` for all waiting tensors of a merge buffer, class by class."""
        batches = self._waiting.pop(buffer, {})
        for device in {arena.tensor_class.device for arena in batches if arena.tensor_class.on_device}:
            self._buffers.kernels.largest(buffer, device).begin()
        for arena, batch in batches.items():
            if arena.tensor_class.on_device:
                self._accumulate_on_device(buffer, arena, batch)
            else:
                self._copy(arena, batch)

    def let_go(self) -> None:
        """Drop references to gradients: work queued from now on runs after the kernels that have read them."""
        self._read.clear()

    def _accumulate_on_device(self, buffer: int, arena: Arena, batch: Batch) -> None:
        """Accumulate the tensors of a merge buffer that lie in ``arena``: few launches, one check for infinities."""
        batch.sort(key=lambda one: one[0].offset)
        # A residual is this rank's own to the end of the round, and so is a gradient; a sum over ranks is not.
        kept = arena.memory.has_residual
        parts = [
            (slot.name, arena.work_of(slot) if kept else gradient) for slot, gradient in batch if gradient is not None
        ]
        self._read += [gradient for _, gradient in batch if gradient is not None]
        kernels, tensor_class = self._buffers.kernels, arena.tensor_class
        table, scratch = kernels.table([slot for slot, _ in batch]), kernels.scratch_of(buffer, tensor_class)
        largest = accumulate_together(arena, batch, table, kernels.largest(buffer, tensor_class.device), scratch)
        self._guard.note(largest, parts)
        if self._buffers.budgets.energy is not None and arena.tensor_class.sparse:
            for slot, gradient in batch:
                self._buffers.budgets.energy.add(slot, gradient)

    def _copy(self, arena: Arena, batch: Batch) -> None:
        """Copy all small dense tensors of a merge buffer into ``arena``, in one call with one check for infinities."""
        add_up(arena, batch)
        start, stop = min([slot.offset for slot, _ in batch]), max([slot.end for slot, _ in batch])
        # Elements between them are of the same merge buffer, and finite, or padding.
        if is_finite(arena.work[start:stop]):
            return
        for slot, _ in batch:
            if self._guard.inspect(slot, arena.work_of(slot)):
                arena.accumulate(slot, None)


# The round.

# Called with the name of a tensor that was not handed over.
GradientOf = Callable[[str], "torch.Tensor | Difference | None"]


class Round:
    """One attempt at step ``step`` with ``buffers``.

    1. :meth:`add` accumulates each tensor's gradient as it becomes ready, and sends every complete merge buffer.
    2. :meth:`receive` adds the tensors that are missing, waits for every message and writes the updates.
    3. :meth:`undo` restores the sparsifiers' state of before an attempt that comes to nothing.

    ``dirty``: this rank's parameters are no longer those of ``buffers``. It sends the plan's messages, but empty, and
    flags it in each; then all ranks discard the attempt. ``flags``: further flags of every message, see :class:`Flag`.
    ``due``: the numbers of the merge buffers that are exchanged, the same on every rank; None: all of them. ``clock``:
    what the round is measured by; None: that of ``buffers``.
    """

    def __init__(
        self,
        buffers: MergeBuffers,
        step: int,
        totals: Totals,
        *,
        dirty: bool,
        flags: int = 0,
        due: Collection[int] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.buffers, self.step, self.totals, self.dirty = buffers, step, totals, dirty
        self.flags, self._due = flags, due
        self.flags_of_all = 0  # flags of all ranks, once the first merge buffer has arrived
        self.used = [False] * len(buffers.layout.slots)  # by slot: any rank has a gradient, once all of them are there
        self.nonfinite = False  # a rank has found a gradient that is not finite: the attempt must leave no trace
        self.noises: list[Noise] = []  # of the updates that messages have brought
        self.received = 0  # merge buffers of which all messages have been read, the first ones of the plan
        self.guard = NonFiniteGuard(keeps=buffers.config.guards.nonfinite == KEEP)
        self.recorder = StepRecorder(clock or buffers.clock, len(buffers.layout.slots), len(buffers.messages))
        self._under_way = MessagesUnderWay(buffers, totals, self.recorder)
        self._batches = Batches(buffers, self.guard)
        self._notes = buffers.kernels.notes()
        self._sparsifier = buffers.config.compression.compressor.part(Kind.SPARSE)
        self._selections: dict[int, Selection] = {}  # by slot, of tensors that are selected from before merging
        self._prepared: set[int] = set()  # slots that were prepared while they were accumulated
        # By merge buffer: tensors on devices that are prepared from where their gradients lie, which may still be read.
        self._read: dict[int, list[tuple[Slot, torch.Tensor]]] = {}
        # Tensors still to come, per merge buffer.
        self._missing = [
            count if due is None or buffer in due else 0 for buffer, count in enumerate(buffers.plan.counts)
        ]
        self._added: dict[int, bool] = {}  # by slot: whether there was a gradient
        self._known = buffers.config.compression.compressor.snapshot()  # its state before this attempt

    @property
    def is_complete(self) -> bool:
        """Return whether all merge buffers are exchanged."""
        return self._due is None

    def slots(self, *, due: bool = True) -> Iterator[Slot]:
        """Return the tensors that are exchanged in this round; ``due`` False: those that are not."""
        slots = self.buffers.layout.slots
        if self._due is None:  # called in every step, for every tensor
            return iter(slots if due else ())
        return (slot for slot in slots if (self.buffers.buffer_of[slot.index] in self._due) is due)

    def left_out(self, *, unused: bool, dropped: Container[str] = ()) -> Iterator[Slot]:
        """Yield the tensors that are not exchanged in this round, those ``dropped``, by name, and others.

        ``unused``: those that no rank had, too.
        """
        yield from self.slots(due=False)
        for slot in self.slots() if unused or dropped else ():
            if (unused and not self.used[slot.index]) or slot.name in dropped:
                yield slot

    def keep(self, names: Container[str]) -> None:
        """Make ``work`` of some tensors, those that a rank had, the residual; the round has been received."""
        for slot in self.slots():
            if slot.name in names and self.used[slot.index]:
                self.buffers.flat.arena_of[slot.index].keep(slot)

    @property
    def comes_to_nothing(self) -> bool:
        """Return whether ranks are known to repeat or to skip it: whatever has been received does not count."""
        return self.nonfinite or bool(self.flags_of_all & Flag.REPLAN)

    def cut(self, buffers: int) -> None:
        """End with the first ``buffers`` merge buffers, which have been received: the others never will be.

        Their tensors count as not exchanged in this round.
        """
        self._under_way.forget()
        first = range(buffers)
        self._due = first if self._due is None else set(first).intersection(self._due)
        left_out = {slot.index for slot in self.slots(due=False)}
        self.nonfinite = False  # what is left out may have said so
        self._settle([used or index in left_out for index, used in enumerate(self.used)])

    # -- 1. gradients in, messages out --------------------------------------------------------------------------

    def add(self, slot: Slot, gradient: torch.Tensor | None, *, stays: bool = False) -> torch.Tensor | None:
        """Collective. Accumulate the gradient of one tensor (None: it has none), and send complete merge buffers.

        Returns the tensor that the caller should use in its place until the round has ended: the same numbers. With
        ``stays`` that is the gradient itself.
        """
        if not self._added:
            self.recorder.begin()
        held = gradient
        if gradient is None or self.dirty or stays or not self.buffers.flat.may_move[slot.index]:
            self._take(slot, gradient)
        else:
            held = self._take_and_move(slot, gradient)
        self._on_added(slot, gradient is not None)
        return held

    def add_all(self, gradient_of: GradientOf) -> None:
        """Collective. Accumulate the missing tensors, calling ``gradient_of`` for each, and send everything."""
        for slot in self.slots():
            if slot.index not in self._added:
                if not self._added:
                    self.recorder.begin()
                gradient = None if self.dirty else gradient_of(slot.name)
                self._take(slot, gradient)
                self._on_added(slot, gradient is not None)

    def _take(self, slot: Slot, gradient: torch.Tensor | Difference | None) -> None:
        """Process this rank's own gradient of a tensor, which stays where it is."""
        if self.dirty:
            return
        if slot.index in self.buffers.flat.in_place.slots:
            self._prepare_in_place(slot, gradient)
        elif slot.index in self.buffers.batched and (gradient is not None or slot.tensor_class.on_device):
            self._batches.hold(slot, as_tensor(gradient))
        else:
            self._accumulate(slot, gradient)

    def _take_and_move(self, slot: Slot, gradient: torch.Tensor) -> torch.Tensor:
        """Process this rank's own gradient of a tensor, and return its copy where the update will be, or itself."""
        arena = self.buffers.flat.arena_of[slot.index]
        if slot.tensor_class.on_device:  # it may wait for its merge buffer: it has to lie where it is read
            gradient = arena.move_to_update(slot, gradient)
            self._take(slot, gradient)
            return gradient
        if slot.index in self.buffers.batched:
            self._take(slot, gradient)
            return arena.move_to_update(slot, gradient)
        notes = self._notes.get(slot.index)
        held, is_bad = arena.accumulate_and_move(slot, gradient, self._fused(slot), notes, self.guard.inspect)
        self._on_accumulated(slot, arena, gradient, is_bad=is_bad)
        return held

    def _accumulate(self, slot: Slot, gradient: torch.Tensor | Difference | None) -> None:
        """Write ``work = residual + gradient`` of a tensor that stays where it is."""
        arena, alongside = self.buffers.flat.arena_of[slot.index], Alongside(notes=self._notes.get(slot.index))
        finite = arena.accumulate(slot, gradient, self._fused(slot), alongside)
        if gradient is not None:
            is_bad = not finite and self.guard.inspect(slot, arena.work_of(slot), finite)
            self._on_accumulated(slot, arena, gradient, is_bad=is_bad)

    def _on_accumulated(self, slot: Slot, arena: Arena, gradient: torch.Tensor | Difference, *, is_bad: bool) -> None:
        """Leave out a gradient of which something is not finite, ``is_bad``.

        The round then comes to nothing; figures, sparsifiers and codecs must not see infinities.
        """
        if is_bad:
            arena.accumulate(slot, None, alongside=Alongside(notes=self._notes.get(slot.index)))
        elif self.buffers.budgets.energy is not None and slot.tensor_class.sparse:
            self.buffers.budgets.energy.add(slot, as_tensor(gradient))

    def _fused(self, slot: Slot) -> Add | None:
        """Return a function that accumulates a tensor and prepares it in the same pass; None: there is none."""
        exchange = self.buffers.prepared.get(slot.index)
        if exchange is None:
            return None

        def add(
            work: torch.Tensor, update: torch.Tensor, residual: torch.Tensor, gradient: torch.Tensor, moves: bool
        ) -> bool | None:
            finite = exchange.add_and_prepare(slot, work, update, residual, gradient, moves=moves)
            if finite:
                self._prepared.add(slot.index)
            return finite

        return add

    def _prepare_in_place(self, slot: Slot, gradient: torch.Tensor | Difference | None) -> None:
        """Prepare a tensor from where its gradient lies: its class has no residual."""
        exchange, values = self.buffers.prepared[slot.index], None
        if gradient is not None and slot.index in self.buffers.flat.in_pieces:
            difference = cast("Difference", gradient)  # of parameters, which no gradient is
            values, finite = difference.subtrahend, exchange.prepare_difference(slot, difference, self.step)
        else:
            values = self.buffers.flat.in_place.hold(slot, as_tensor(gradient))
            finite = exchange.prepare(slot, values, self.step)
        self._prepared.add(slot.index)
        if values is None or finite:
            return
        if slot.tensor_class.on_device:
            self._read.setdefault(self.buffers.buffer_of[slot.index], []).append((slot, values))
        else:
            self.guard.inspect(slot, values, finite)

    def _begin_message(self, slot: Slot) -> None:
        """Select from a tensor, or prepare it, before the others of its merge buffer are ready, if that can be done."""
        segment = self.buffers.presparsified.get(slot.index)
        if segment is not None and slot.index not in self.buffers.batched:
            self._selections[slot.index] = self._select(self.buffers.flat.operands(segment))
        exchange = self.buffers.prepared.get(slot.index)
        if exchange is not None and slot.index not in self._prepared:
            exchange.prepare(slot, self.buffers.flat.arena_of[slot.index].work_of(slot), self.step)

    def _on_added(self, slot: Slot, has_gradient: bool) -> None:
        self._added[slot.index] = has_gradient or self.buffers.flat.has_unsent(slot)
        self.recorder.note((Event.READY, slot.index, self.recorder.now()))
        if slot.tensor_class.on_device:
            self.buffers.side.note(slot.tensor_class.device)
        self._missing[self.buffers.buffer_of[slot.index]] -= 1
        self._send_complete(slot)
        self._under_way.poll()
        self.recorder.note((Event.RESUMED, slot.index, self.recorder.now()))

    def _send_complete(self, slot: Slot) -> None:
        """Collective. Send complete merge buffers, now that ``slot`` has been added."""
        if not self.dirty:
            self._begin_message(slot)
        sent = self._under_way.sent
        while (buffer := len(sent)) < len(self._missing) and self._missing[buffer] == 0:
            self.recorder.note((Event.REACHED, buffer, self.recorder.now()))
            self._send(buffer)

    def _send(self, buffer: int) -> None:
        """Start the messages of a merge buffer in turn: one is selected and encoded while the one before travels."""
        messages: list[SentMessage] = []
        if self._due is None or buffer in self._due:
            with self.buffers.within():
                self._complete(buffer)
                for message in self.buffers.messages[buffer]:
                    messages.append(self._start(message))
                    if len(messages) == 1:
                        self.recorder.note((Event.REACHED, buffer, self.recorder.now()))
        self._under_way.sent.append(messages)

    def _complete(self, buffer: int) -> None:
        """Accumulate and prepare the tensors of a merge buffer that have waited for each other."""
        if self.buffers.batched:
            self._batches.accumulate(buffer)
        for message in self.buffers.messages[buffer]:
            if message.exchange.prepares is None:
                continue
            magnitude = message.exchange.complete(message.name, self.step)
            inside = {slot.index for slot in message.slots} if buffer in self._read else set()
            given = [one for one in self._read.get(buffer, ()) if one[0].index in inside]
            if magnitude is not None and given:
                self.guard.note(magnitude, [(slot.name, values) for slot, values in given])
            for slot, values in given if magnitude is None else ():
                self.guard.inspect(slot, values)

    def _start(self, message: Message) -> SentMessage:
        operands = [self.buffers.flat.operands(segment, is_empty=self.dirty) for segment in message.segments]
        selections = [
            self._selection(operand) if is_selected else None
            for operand, is_selected in zip(operands, message.selected, strict=True)
        ]
        used = tuple(self._added[slot.index] for slot in message.slots)
        header = self._header(message.buffer, used, operands[0].work.device)
        sent = self._under_way.start(message, operands, selections, header)
        if sent[1].overflows:
            self.guard.report(sent[1].overflows)
        return sent

    def _selection(self, operand: SegmentBuffers) -> Selection:
        """Return the selection of a segment, made ahead or now; an empty one of its capacity if this rank is dirty."""
        if not self.dirty:
            return self._selections.pop(operand.segment.slots[0].index, None) or self._select(operand)
        assert isinstance(self._sparsifier, Sparsifier)
        work, k, shapes = self.buffers.vector(operand, self.step)
        capacity = self._sparsifier.capacity(work.numel(), k=k, step=self.step, shapes=shapes)
        return Selection(torch.zeros(capacity, dtype=torch.int32, device=work.device), 0)

    def _select(self, operand: SegmentBuffers) -> Selection:
        assert isinstance(self._sparsifier, Sparsifier)  # the tensor class is a sparse one
        work, k, shapes = self.buffers.vector(operand, self.step)
        key, scratch = operand.segment.key, self.buffers.kernels.scratch(operand.segment)
        return self._sparsifier.select(work, k=k, key=key, step=self.step, shapes=shapes, scratch=scratch)

    def _header(self, buffer: int, used: tuple[bool, ...], device: torch.device) -> RoundHeader:
        finite = None if device.type == "cpu" else self.guard.finite_on(device)
        flags = self.flags | (Flag.REPLAN if self.dirty else 0) | (Flag.NONFINITE if self.guard.found else 0)
        return RoundHeader(self.step, self.buffers.fingerprint, buffer, flags, used, finite)

    def poll(self) -> None:
        """Collective. Start second phases of messages that are due. Waits for nothing."""
        self._under_way.poll()

    # -- 2. updates -----------------------------------------------------------------------------------------------

    def receive(self, gradient_of: GradientOf) -> bool:
        """Collective. Add the missing tensors, wait for every message, and write every update.

        Returns False, with nothing written, where the attempt has to be repeated after a new agreement.
        """
        self.add_all(gradient_of)
        try:
            with self.buffers.within():
                agreed = self._receive(len(self._under_way.sent))
                if agreed and not self.nonfinite:
                    self._settle(self.used)
                return agreed
        finally:
            self.let_go()

    def _settle(self, used: Sequence[bool]) -> None:
        """Finish updates, all of which are there. ``used``: by slot, whether any rank has a gradient."""
        self.buffers.flat.settle(used)
        self.totals.sent(self.buffers.flat.updates.gather(self.buffers.flat.arenas), 0)

    def receive_first(self, buffers: int) -> bool:
        """Collective. Wait for the first so many merge buffers, which have been sent, and write their updates.

        Those that have been received already, before an error, are left out. Returns as :meth:`receive` does.
        """
        try:
            with self.buffers.within():
                return self._receive(buffers)
        finally:
            self.let_go()

    def _receive(self, buffers: int) -> bool:
        """Collective. Wait for so many merge buffers and write their updates, as :meth:`receive_first` does."""
        self._under_way.queue(buffers, writes=not self.dirty)
        agreed = not self.flags_of_all & Flag.REPLAN
        is_first = not self.received
        for buffer, messages in enumerate(self._under_way.sent[:buffers]):
            if buffer < self.received or not messages:
                continue
            headers = self._under_way.headers(buffer)
            self.nonfinite |= any(header.flags & Flag.NONFINITE for header in headers)
            if is_first:  # a flag is in all messages of its rank, so all ranks see it here
                for header in headers:
                    self.flags_of_all |= header.flags
                agreed, is_first = not self.flags_of_all & Flag.REPLAN, False
            self.noises += self._under_way.finish(buffer, writes=agreed and not self.nonfinite)
            for (message, _), header in zip(messages, headers, strict=True):
                for slot, used in zip(message.slots, header.used, strict=True):
                    self.used[slot.index] |= used and agreed
            self.received = buffer + 1
        return agreed

    def has_update(self, slot: Slot) -> bool:
        """Return whether a tensor has an update: a rank used it, or a residual of it was sent."""
        return self.used[slot.index] or (not self.nonfinite and self.buffers.flat.left_over(slot))

    # -- 3. an attempt that fails -----------------------------------------------------------------------------------

    def let_go(self) -> None:
        """Make device work queued from now on wait for this round, and drop the round's references to gradients."""
        self.buffers.side.join()
        self._batches.let_go()
        self._read.clear()

    def undo(self) -> None:
        """Restore the compressor's state of before this attempt. Residuals are unchanged anyway."""
        self.let_go()
        self._under_way.forget()
        self.buffers.flat.forget_owing()
        self.buffers.config.compression.compressor.load_state_dict(self._known)
