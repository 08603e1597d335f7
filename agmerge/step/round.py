# SPDX-License-Identifier: Apache-2.0
"""Exchange of the gradients of one step, once: tensors in, messages out in plan order, updates back.

Until every message of the first merge buffer has arrived, nothing that a round writes is visible: gradients and
residuals are as they were, so a round can be discarded and repeated after a new agreement.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence

import torch

from agmerge.backends import status
from agmerge.backends.streams import streams_of
from agmerge.errors import CollectiveTimeout
from agmerge.exchanges import InFlight, Noise, SegmentBuffers
from agmerge.exchanges.host_copies import HostCopies
from agmerge.exchanges.message.format import Flag, RoundHeader
from agmerge.exchanges.routing import Message
from agmerge.metrics.step_times import Clock, StepRecorder
from agmerge.metrics.totals import Totals
from agmerge.step.accumulation import Accumulation
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.tensors.arena import Difference
from agmerge.tensors.layout import Slot
from agmerge.tensors.nonfinite import NonFiniteGuard
from sparsifiers import Kind, Selection

# Headers of messages on devices, brought to the host in one wait.
#
# Until then only the devices wait for the messages and write their updates: the host merely queues that. No result is
# visible, for an update becomes a gradient only after all headers were checked.


def said_by_all(messages: Iterable[InFlight], timeout: float) -> dict[int, list[torch.Tensor]]:
    """Return the tensors that :meth:`Exchange.read` takes for each message, on the host, by the message's ``id``.

    ``messages``: in plan order, each with all of ``said``. Their devices wait for them already; here the host waits,
    with the deadline: raises :class:`agmerge.CollectiveTimeout` after ``timeout`` seconds, which names the first
    missing message.
    """
    by_device: dict[torch.device, list[InFlight]] = {}
    for message in messages:
        by_device.setdefault(message.message.device, []).append(message)
    copies = []
    for device, group in by_device.items():
        streams = streams_of(device)
        assert streams is not None, f"{group[0].name}: {device} was not told to wait"
        copies.append(HostCopies([part for message in group for part in message.said], streams))
    found: dict[int, list[torch.Tensor]] = {}
    deadline = time.monotonic() + timeout
    for group, copy in zip(by_device.values(), copies, strict=True):
        with status.waiting_for(group[0].name, ()):
            if not copy.arrive(deadline - time.monotonic()):
                missing = next((message for message in group if not message.handle.done()), group[-1])
                raise CollectiveTimeout(f"AGM201: {missing.name}: no answer from all ranks within {timeout:g} s")
        parts = iter(copy.tensors())
        found |= {id(message): [next(parts) for _ in message.said] for message in group}
    return found


# Messages under way.

SentMessage = tuple[Message, InFlight]


class MessagesUnderWay:
    """Messages of a round, merge buffer by merge buffer, from their start to their updates.

    On devices that can wait for messages by themselves, the host queues all work on them with :meth:`queue`, and then
    waits once for their headers. Elsewhere :meth:`headers` waits for one merge buffer's messages after the other.
    """

    def __init__(self, buffers: MergeBuffers, totals: Totals, recorder: StepRecorder) -> None:
        self._buffers, self._totals, self._recorder = buffers, totals, recorder
        self.sent: list[list[SentMessage]] = []  # per merge buffer; empty: it is not exchanged in this round
        # By message: bytes, elements, and bytes by codec that are in the totals already.
        self._counted: dict[int, tuple[int, int, Mapping[str, int]]] = {}
        self._waited: set[int] = set()  # by `id`: messages that devices wait for, or have
        self._arrived = 0  # merge buffers with messages that are known to have arrived
        self._said: dict[int, list[torch.Tensor]] = {}  # by the `id` of a queued message: input of `Exchange.read`

    def start(
        self,
        message: Message,
        operands: Sequence[SegmentBuffers],
        selections: Sequence[Selection | None],
        header: RoundHeader,
    ) -> SentMessage:
        """Collective. Start one message, and count its bytes."""
        if self._buffers.store.counts_zeros and not header.flags & Flag.REPLAN:
            self._count_zeros(message, operands)
        in_flight = message.exchange.start(message.name, operands, selections, header)
        self._count(in_flight)
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
                    for exchange in self._buffers.in_use:
                        exchange.advance()
                    return
            if self.sent[self._arrived]:
                self._recorder.arrived()
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
                queued += [in_flight for _, in_flight in messages]
                left = [one for one in messages if id(one[1]) not in self._waited]
                if not left:
                    continue
                self._recorder.mark(buffer)
                for message, in_flight in left:
                    message.exchange.wait_on_stream(in_flight)
                    self._waited.add(id(in_flight))
                self._recorder.mark(buffer)
                for message, in_flight in messages if writes else ():
                    if not message.exchange.overwrites:
                        message.exchange.finish(in_flight)
                self._recorder.mark(buffer)
        self._said = said_by_all(queued, self._buffers.config.guards.timeout)

    def headers(self, buffer: int) -> list[RoundHeader]:
        """Collective. Return the merged headers of a merge buffer's messages; wait for those that were not queued."""
        messages = self.sent[buffer]
        if self._is_queued(buffer):
            found = [message.exchange.read(in_flight, self._said[id(in_flight)]) for message, in_flight in messages]
        else:
            self._recorder.mark(buffer)
            found = [message.exchange.wait(in_flight) for message, in_flight in messages]
            self._recorder.mark(buffer)
        for _, in_flight in messages:
            self._count(in_flight)  # bytes sent since its start
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
            self._recorder.mark(buffer)
        self.poll()
        return noises

    def _is_queued(self, buffer: int) -> bool:
        return id(self.sent[buffer][0][1]) in self._said

    def _count(self, in_flight: InFlight) -> None:
        """Add a message's new bytes and elements to the totals: some messages go on sending after their start."""
        size, elements, codecs = self._counted.get(id(in_flight), (0, 0, {}))
        if (in_flight.bytes, in_flight.elements) != (size, elements):
            new = {what: count - codecs.get(what, 0) for what, count in in_flight.codecs.items()}
            by_codec = new if sum(new.values()) == in_flight.bytes - size else None
            self._totals.sent(in_flight.bytes - size, in_flight.elements - elements, by_codec)
            self._counted[id(in_flight)] = (in_flight.bytes, in_flight.elements, dict(in_flight.codecs))


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
        self.guard = NonFiniteGuard()
        self.recorder = StepRecorder(clock or buffers.clock, len(buffers.layout.slots), len(buffers.messages))
        self._under_way = MessagesUnderWay(buffers, totals, self.recorder)
        self._accumulation = Accumulation(buffers, step, self.guard)
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
        if not self.dirty:
            self._accumulation.add(slot, gradient, moves=False)

    def _take_and_move(self, slot: Slot, gradient: torch.Tensor) -> torch.Tensor:
        """Process this rank's own gradient of a tensor, and return its copy where the update will be, or itself."""
        if slot.tensor_class.on_device:  # it may wait for its merge buffer: it has to lie where it is read
            gradient = self._accumulation.moved(slot, gradient)
            self._accumulation.add(slot, gradient, moves=True)
            return gradient
        self._accumulation.add(slot, gradient, moves=True)
        return self._accumulation.moved(slot, gradient)

    def _on_added(self, slot: Slot, has_gradient: bool) -> None:
        self._added[slot.index] = has_gradient or self.buffers.flat.has_unsent(slot)
        self.recorder.ready(slot.index)
        if slot.tensor_class.on_device:
            self.buffers.side.note(slot.tensor_class.device)
        self._missing[self.buffers.buffer_of[slot.index]] -= 1
        self._send_complete(slot)
        self._under_way.poll()
        self.recorder.resumed()

    def _send_complete(self, slot: Slot) -> None:
        """Collective. Send complete merge buffers, now that ``slot`` has been added."""
        if not self.dirty:
            self._accumulation.prepare(slot)
        sent = self._under_way.sent
        while (buffer := len(sent)) < len(self._missing) and self._missing[buffer] == 0:
            self.recorder.mark(buffer)
            self._send(buffer)

    def _send(self, buffer: int) -> None:
        """Start the messages of a merge buffer in turn: one is selected and encoded while the one before travels."""
        messages: list[SentMessage] = []
        if self._due is None or buffer in self._due:
            with self.buffers.side.within():
                self._accumulation.complete(buffer)
                for message in self.buffers.messages[buffer]:
                    messages.append(self._start(message))
                    if len(messages) == 1:
                        self.recorder.mark(buffer)
        self._under_way.sent.append(messages)

    def _start(self, message: Message) -> SentMessage:
        select = self._accumulation.empty_selection if self.dirty else self._accumulation.selection
        operands = [self.buffers.flat.operands(segment, is_empty=self.dirty) for segment in message.segments]
        selections = [
            select(segment) if is_selected else None
            for segment, is_selected in zip(message.segments, message.selected, strict=True)
        ]
        used = tuple(self._added[slot.index] for slot in message.slots)
        header = self._header(message.buffer, used, operands[0].work.device)
        sent = self._under_way.start(message, operands, selections, header)
        self.guard.report(sent[1].overflows)
        return sent

    def _header(self, buffer: int, used: tuple[bool, ...], device: torch.device) -> RoundHeader:
        flags = self.flags | (Flag.REPLAN if self.dirty else 0) | (Flag.NONFINITE if self.guard.found else 0)
        return RoundHeader(self.step, self.buffers.fingerprint, buffer, flags, used, self.guard.finite_on(device))

    # -- 2. updates -----------------------------------------------------------------------------------------------

    def receive(self, gradient_of: GradientOf) -> bool:
        """Collective. Add the missing tensors, wait for every message, and write every update.

        Returns False, with nothing written, where the attempt has to be repeated after a new agreement.
        """
        self.add_all(gradient_of)
        try:
            with self.buffers.side.within():
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
            with self.buffers.side.within():
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
        self._accumulation.let_go()

    def undo(self) -> None:
        """Restore the compressor's state of before this attempt. Residuals are unchanged anyway."""
        self.let_go()
        self.buffers.config.compression.compressor.load_state_dict(self._known)
