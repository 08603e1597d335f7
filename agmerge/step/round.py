"""Exchange of the gradients of one step, once: tensors in, messages out in plan order, updates back.

Until every message of the first merge buffer has arrived, nothing that a round writes is visible: gradients and
residuals are as they were, so a round can be discarded and repeated after a new agreement.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from agmerge.exchanges import InFlight, Noise, SegmentBuffers
from agmerge.exchanges.message.format import Flag, RoundHeader
from agmerge.exchanges.routing import Message
from agmerge.metrics.step_times import Clock, StepRecorder
from agmerge.metrics.totals import Totals
from agmerge.step.batches import Batches
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.step.queued_messages import said_by_all
from agmerge.tensors.arena import Add
from agmerge.tensors.difference import Difference
from agmerge.tensors.layout import Segment, Slot
from agmerge.tensors.nonfinite import NonFiniteGuard
from sparsifiers import Kind, Selection, Sparsifier
from sparsifiers.compensation import Alongside

# Called with the name of a tensor that was not handed over.
GradientOf = Callable[[str], "torch.Tensor | Difference | None"]
SentMessage = tuple[Message, InFlight]


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
        self.guard = NonFiniteGuard()
        self.recorder = StepRecorder(clock or buffers.clock, len(buffers.layout.slots), len(buffers.messages))
        # Tensors still to come, per merge buffer.
        self._missing = [count if self._is_due(buffer) else 0 for buffer, count in enumerate(buffers.plan.counts)]
        self._added: dict[int, bool] = {}  # by slot: whether there was a gradient
        self._batches = Batches(buffers, self.guard)
        self._offers: dict[int, Selection] = {}  # by slot, of tensors that are sparsified ahead
        self._is_prepared: set[int] = set()  # slots that were prepared while they were accumulated
        self._has_moved: set[int] = set()  # slots with a gradient that moved to its update's place meanwhile
        self._in_flight: list[list[SentMessage]] = []  # per merge buffer that was sent
        # By message: bytes, elements, and bytes by codec that are in the totals already.
        self._counted: dict[int, tuple[int, int, Mapping[str, int]]] = {}
        self._arrived = 0  # merge buffers with messages that are known to have arrived
        self._known = buffers.config.compression.compressor.snapshot()  # its state before this attempt

    def _is_due(self, buffer: int) -> bool:
        return self._due is None or buffer in self._due

    @property
    def whole(self) -> bool:
        """Return whether all merge buffers are exchanged."""
        return self._due is None

    def slots(self, *, due: bool = True) -> Iterator[Slot]:
        """Return the tensors that are exchanged in this round; ``due`` False: those that are not."""
        slots = self.buffers.layout.slots
        if self._due is None:  # called in every step, for every tensor
            return iter(slots if due else ())
        return (slot for slot in slots if (self.buffers.buffer_of[slot.index] in self._due) is due)

    def left_out(self, *, unused: bool) -> Iterator[Slot]:
        """Yield the tensors that are not exchanged in this round and, with ``unused``, those that no rank had."""
        yield from self.slots(due=False)
        for slot in self.slots() if unused else ():
            if not self.used[slot.index]:
                yield slot

    # -- 1. gradients -------------------------------------------------------------------------------------------

    def add(self, slot: Slot, gradient: torch.Tensor | None, *, stays: bool = False) -> torch.Tensor | None:
        """Collective. Accumulate the gradient of one tensor (None: it has none), and send complete merge buffers.

        Returns the tensor that the caller should use in its place until the round has ended: the same numbers. With
        ``stays`` that is the gradient itself.
        """
        if not self._added:
            self.recorder.begin()
        moves = not (self.dirty or stays) and self.buffers.flat.may_move[slot.index]
        if gradient is not None and moves and slot.lane.on_device:
            gradient = self._moved(slot, gradient)  # it may wait for its merge buffer: it has to lie where it is read
        self._on_gradient(slot, gradient, moves)
        held = self._moved(slot, gradient) if gradient is not None and moves and not slot.lane.on_device else gradient
        self._on_added(slot, gradient)
        return held

    def add_all(self, gradient_of: GradientOf) -> None:
        """Collective. Accumulate the missing tensors, calling ``gradient_of`` for each, and send everything."""
        for slot in self.slots():
            if slot.index not in self._added:
                if not self._added:
                    self.recorder.begin()
                gradient = None if self.dirty else gradient_of(slot.name)
                self._on_gradient(slot, gradient, moves=False)
                self._on_added(slot, gradient)
        self._drain()

    def _on_added(self, slot: Slot, gradient: torch.Tensor | Difference | None) -> None:
        self._added[slot.index] = gradient is not None or self.buffers.flat.has_unsent(slot)
        self.recorder.ready(slot.index)
        if slot.lane.on_device:
            self.buffers.side.note(slot.lane.device)
        self._missing[self.buffers.buffer_of[slot.index]] -= 1
        self._send_complete(slot)
        self._poll()
        self.recorder.resumed()

    def _on_gradient(self, slot: Slot, gradient: torch.Tensor | Difference | None, moves: bool) -> None:
        """Process this rank's own gradient of a tensor. ``moves``: it may move to its update's place, see `_moved`."""
        self._accumulate(slot, gradient, moves)

    def _moved(self, slot: Slot, gradient: torch.Tensor) -> torch.Tensor:
        """Return the tensor to use in a gradient's place: its copy where the update will be, or itself."""
        if slot.index in self._has_moved:
            return self.buffers.flat.arena_of[slot.index].gradients[slot.index]
        return self.buffers.flat.arena_of[slot.index].move_to_update(slot, gradient)

    def _accumulate(self, slot: Slot, gradient: torch.Tensor | Difference | None, moves: bool) -> None:
        """Write ``work = residual + gradient``, without gradients that are not finite.

        The attempt then comes to nothing; figures, sparsifiers and codecs must not see infinities.
        """
        if self.dirty:
            return
        if slot.index in self.buffers.flat.in_place:
            self._prepare_in_place(slot, gradient)
            return
        if slot.index in self.buffers.batched and (gradient is not None or slot.lane.on_device):
            gradient = gradient.tensor() if isinstance(gradient, Difference) else gradient
            self._batches.hold(slot, gradient)
            return
        arena, notes = self.buffers.flat.arena_of[slot.index], self.buffers.kernels.notes(slot)
        copy = arena.update_for(slot, gradient) if moves and isinstance(gradient, torch.Tensor) else None
        finite = arena.accumulate(slot, gradient, self._add_and_prepare(slot, copy is not None), Alongside(copy, notes))
        if copy is not None:
            self._has_moved.add(slot.index)
        if gradient is None:
            return
        if not finite and self.guard.inspect(slot, arena.work_of(slot), finite):
            arena.accumulate(slot, None, alongside=Alongside(notes=notes))
        elif self.buffers.budgets.energy is not None and slot.lane.sparse:
            self.buffers.budgets.energy.add(slot, gradient.tensor() if isinstance(gradient, Difference) else gradient)

    def _prepare_in_place(self, slot: Slot, gradient: torch.Tensor | Difference | None) -> None:
        """Prepare a tensor from where its gradient lies: its class has no residual."""
        gradient = gradient.tensor() if isinstance(gradient, Difference) else gradient
        values = self.buffers.flat.in_place.hold(slot, gradient)
        finite = self.buffers.prepared[slot.index].prepare(slot, values, self.step)
        self._is_prepared.add(slot.index)
        if values is not None and not finite:
            self.guard.inspect(slot, values, finite)

    def _add_and_prepare(self, slot: Slot, moves: bool) -> Add | None:
        """Return a function that accumulates a tensor and prepares it in the same pass; None: there is none.

        It also moves the gradient, if that ``moves``.
        """
        exchange = self.buffers.prepared.get(slot.index)
        if exchange is None:
            return None

        def add(
            work: torch.Tensor, update: torch.Tensor, residual: torch.Tensor, gradient: torch.Tensor
        ) -> bool | None:
            finite = exchange.add_and_prepare(slot, work, update, residual, gradient, moves=moves)
            if finite:
                self._is_prepared.add(slot.index)
            return finite

        return add

    # -- messages leave -------------------------------------------------------------------------------------------

    def _send_complete(self, slot: Slot) -> None:
        """Send complete merge buffers, now that ``slot`` has been added."""
        self._prepare(slot)
        while (buffer := len(self._in_flight)) < len(self._missing) and self._missing[buffer] == 0:
            self.recorder.mark(buffer)
            self._send(buffer)

    def _drain(self) -> None:
        """Start all messages that are left: every tensor has been added. Here none is left."""

    def _prepare(self, slot: Slot) -> None:
        """Begin a tensor's message before the other tensors of its merge buffer are ready: select, or prepare."""
        segment = self.buffers.presparsified.get(slot.index)
        if segment is not None and slot.index not in self.buffers.batched:
            self._offers[slot.index] = self._select(segment)
        exchange = self.buffers.prepared.get(slot.index)
        if exchange is not None and not self.dirty and slot.index not in self._is_prepared:
            exchange.prepare(slot, self.buffers.flat.arena_of[slot.index].work_of(slot), self.step)

    def _send(self, buffer: int) -> None:
        """Start the messages of a merge buffer in turn: one is selected and encoded while the one before travels."""
        if not self._is_due(buffer):
            self._in_flight.append([])
            return
        with self.buffers.side.within():
            self._batches.accumulate(buffer)
            first, *others = self.buffers.messages[buffer]
            sent = [(first, self._start(first))]
            self.recorder.mark(buffer)
            sent += [(message, self._start(message)) for message in others]
        self._in_flight.append(sent)

    def _start(self, message: Message) -> InFlight:
        loads = [self._load(segment) for segment in message.segments]
        offers = [
            self._offer(segment) if selected else None
            for segment, selected in zip(message.segments, message.selected, strict=True)
        ]
        used = tuple(self._added[slot.index] for slot in message.slots)
        header = self._header(message.buffer, used, loads[0].work.device)
        in_flight = message.exchange.start(message.name, loads, offers, header)
        self._count_bytes(in_flight)
        self.guard.report(in_flight.overflows)
        return in_flight

    def _load(self, segment: Segment) -> SegmentBuffers:
        load = self.buffers.flat.operands(segment)
        if segment.slots[0].index in self.buffers.flat.in_place:
            return load  # its work is not read
        if self.dirty and self.buffers.flat.arenas[segment.lane].in_place:
            # Its gradients may lie there, views of the last updates, and are needed once ranks have agreed again.
            load = replace(load, work=torch.zeros_like(load.work))
        return load

    def _header(self, buffer: int, used: tuple[bool, ...], device: torch.device) -> RoundHeader:
        flags = self.flags | (Flag.REPLAN if self.dirty else 0) | (Flag.NONFINITE if self.guard.found else 0)
        return RoundHeader(self.step, self.buffers.fingerprint, buffer, flags, used, self.guard.finite_on(device))

    def _offer(self, segment: Segment) -> Selection:
        """Return the selection of a segment, made ahead or now."""
        return self._offers.pop(segment.slots[0].index, None) or self._select(segment)

    def _select(self, segment: Segment) -> Selection:
        sparsifier = self.buffers.config.compression.compressor.part(Kind.SPARSE)
        assert isinstance(sparsifier, Sparsifier)  # the tensor class is a sparse one
        work, k, shapes = self.buffers.vector(segment, self.step)
        if self.dirty:
            capacity = sparsifier.capacity(work.numel(), k=k, step=self.step, shapes=shapes)
            return Selection(torch.zeros(capacity, dtype=torch.int32, device=work.device), 0)
        scratch = self.buffers.kernels.scratch(segment)
        return sparsifier.select(work, k=k, key=segment.key, step=self.step, shapes=shapes, scratch=scratch)

    def _poll(self) -> None:
        """Record which messages have arrived: the ends of hidden exchanges could not be timed otherwise.

        Second phases of later merge buffers do not wait for earlier ones, which other exchanges may carry.
        """
        while self._arrived < len(self._in_flight):
            for message, in_flight in self._in_flight[self._arrived]:
                if not message.exchange.arrived(in_flight):
                    for exchange in self.buffers.in_use:
                        exchange.advance()
                    return
            if self._in_flight[self._arrived]:
                self.recorder.arrived()
            self._arrived += 1

    def _count_bytes(self, in_flight: InFlight) -> None:
        """Add a message's new bytes and elements to the totals: some messages go on sending after their start."""
        size, elements, codecs = self._counted.get(id(in_flight), (0, 0, {}))
        if (in_flight.bytes, in_flight.elements) != (size, elements):
            new = {what: count - codecs.get(what, 0) for what, count in in_flight.codecs.items()}
            by_codec = new if sum(new.values()) == in_flight.bytes - size else None
            self.totals.sent(in_flight.bytes - size, in_flight.elements - elements, by_codec)
            self._counted[id(in_flight)] = (in_flight.bytes, in_flight.elements, dict(in_flight.codecs))

    # -- 2. updates -----------------------------------------------------------------------------------------------

    def receive(self, gradient_of: GradientOf) -> bool:
        """Collective. Add the missing tensors, wait for every message, and write every update.

        Returns False, with nothing written, where the attempt has to be repeated after a new agreement.
        """
        self.add_all(gradient_of)
        try:
            with self.buffers.side.within():
                return self._receive()
        finally:
            self.let_go()

    def _receive(self) -> bool:
        """Collective. Wait for all messages and write every update; return the result of :meth:`receive`."""
        said = self._queue()
        agreed = is_first = True
        for buffer, messages in enumerate(self._in_flight):
            if not messages:
                continue
            is_queued = id(messages[0][1]) in said
            headers = self._headers_said(messages, said) if is_queued else self._headers_waited_for(buffer, messages)
            for _, in_flight in messages:
                self._count_bytes(in_flight)  # bytes sent since its start
            self._poll()
            for header in headers:
                self.nonfinite |= bool(header.flags & Flag.NONFINITE)
                if is_first:  # a flag is in all messages of its rank, so all ranks see it here
                    self.flags_of_all |= header.flags
            if is_first:
                agreed, is_first = not self.flags_of_all & Flag.REPLAN, False
            if agreed:
                self._take(messages, headers, is_queued)
            if not is_queued:
                self.recorder.mark(buffer)
                self._poll()
        if agreed and not self.nonfinite:
            self.buffers.flat.settle(self.used)
            self.totals.sent(self.buffers.flat.updates.gather(self.buffers.flat.arenas), 0)
        return agreed

    def _headers_said(self, messages: Sequence[SentMessage], said: dict[int, list[torch.Tensor]]) -> list[RoundHeader]:
        """Return the headers of a merge buffer's queued messages. ``said``: the result of :meth:`_queue`."""
        return [message.exchange.read(in_flight, said[id(in_flight)]) for message, in_flight in messages]

    def _headers_waited_for(self, buffer: int, messages: Sequence[SentMessage]) -> list[RoundHeader]:
        """Collective. Wait for a merge buffer's messages, and return their headers."""
        self.recorder.mark(buffer)
        headers = [message.exchange.wait(in_flight) for message, in_flight in messages]
        self.recorder.mark(buffer)
        return headers

    def _take(self, messages: Sequence[SentMessage], headers: Sequence[RoundHeader], is_queued: bool) -> None:
        """Collective. Write the updates of a merge buffer's messages, unless devices do, and record used tensors."""
        for (message, in_flight), header in zip(messages, headers, strict=True):
            if not self.nonfinite and not is_queued:
                message.exchange.finish(in_flight)
                noise = message.exchange.noise(in_flight)
                self.noises += [] if noise is None else [noise]
            for slot, used in zip(message.slots, header.used, strict=True):
                self.used[slot.index] |= used

    def _queue(self) -> dict[int, list[torch.Tensor]]:
        """Collective. Queue all device work on arriving messages, and return the headers' tensors, for which it waits.

        They are by the ``id`` of the message. Of a merge buffer all messages are queued, or none is. Should the attempt
        have to be repeated, its gradients do not lie where updates were written: see :meth:`add`.
        """
        queued = []
        for buffer, messages in enumerate(self._in_flight):
            if messages and all(message.exchange.can_queue(in_flight) for message, in_flight in messages):
                self.recorder.mark(buffer)
                for message, in_flight in messages:
                    message.exchange.wait_on_stream(in_flight)
                self.recorder.mark(buffer)
                for message, in_flight in () if self.dirty else messages:
                    message.exchange.finish(in_flight)
                self.recorder.mark(buffer)
                queued += [in_flight for _, in_flight in messages]
        return said_by_all(queued, self.buffers.config.guards.timeout)

    def has_update(self, slot: Slot) -> bool:
        """Return whether a tensor has an update: a rank used it, or a residual of it was sent."""
        return self.used[slot.index] or (not self.nonfinite and self.buffers.flat.left_over(slot))

    # -- 3. an attempt that fails -----------------------------------------------------------------------------------

    def let_go(self) -> None:
        """Make device work queued from now on wait for this round, and drop the round's references to gradients."""
        self.buffers.side.join()
        self._batches.let_go()

    def undo(self) -> None:
        """Restore the compressor's state of before this attempt. Residuals are unchanged anyway."""
        self.let_go()
        self.buffers.config.compression.compressor.load_state_dict(self._known)
