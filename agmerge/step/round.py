"""One attempt to exchange the gradients of one step: tensors in, messages out in plan order, updates back.

Until every message of the first merge buffer is known, nothing that an attempt writes is visible: gradients
and residuals are as they were, so an attempt can be discarded and repeated after a new agreement.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from agmerge.exchanges import InFlight
from agmerge.exchanges.message.format import Flag, RoundHeader
from agmerge.exchanges.routing import Message, key
from agmerge.metrics.step_times import StepRecorder
from agmerge.metrics.totals import Totals
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.tensors.layout import Lane, Segment, Slot
from agmerge.tensors.nonfinite import NonFiniteGuard
from sparsifiers import Selection


class Round:
    """An attempt at step ``step`` in ``session``.

    ``dirty``: this rank's parameters are no longer those of the session. It sends what the plan asks for, but
    empty, and says so in every message; then all ranks discard the attempt. ``flags``: what else it says in every
    message. ``said``: the flags of all ranks together, once the first merge buffer is there. ``used``: by slot, whether
    any rank has a gradient in this step, once all of them are there.
    """

    def __init__(self, session: MergeBuffers, step: int, stats: Totals, *, dirty: bool, flags: int = 0) -> None:
        self.session, self.step, self.stats, self.dirty = session, step, stats, dirty
        self.flags, self.said = flags, 0
        self.used = [False] * len(session.layout.slots)
        self._missing = list(session.plan.counts)  # tensors still to come, per merge buffer
        self._fed: dict[int, bool] = {}  # by slot: whether there was a gradient
        self._small: dict[int, list[tuple[Slot, torch.Tensor]]] = {}  # by merge buffer: not yet in `work`
        self._offers: dict[int, Selection] = {}  # by slot, of tensors that are sparsified ahead
        self._pending: list[list[tuple[Message, InFlight]]] = []  # per merge buffer under way
        self._counted: dict[int, tuple[int, int]] = {}  # bytes and elements of each message that are in the totals
        self._arrived = 0  # merge buffers whose messages are known to be here
        self.recorder = StepRecorder(session.clock, len(session.layout.slots), len(session.messages))
        self.watch = self._of_work = NonFiniteGuard(session.config.nonfinite)
        self.nonfinite = False  # a rank has found a gradient that is not finite: nothing of this may be kept
        sparsifier = session.config.sparsifier
        self._known = sparsifier.snapshot() if sparsifier is not None else {}

    def feed(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Collective. The gradient of one tensor is ready (None: it has none); send what is now complete."""
        self.recorder.begin()
        slot = self.session.slot_of[parameter]
        self._take(slot, gradient)
        if gradient is not None and not self.dirty:
            resting = self.session.rest(slot, gradient)
            if resting is not gradient:
                parameter.grad = resting
        self._fed[slot.index] = gradient is not None
        self.recorder.ready(slot.index)
        self._missing[self.session.buffer_of[slot.index]] -= 1
        self._advance(slot)
        self._look()
        self.recorder.resumed()

    def _take(self, slot: Slot, gradient: torch.Tensor | None) -> None:
        """This rank's gradient of a tensor is there."""
        self._compensate(slot, gradient)

    def _advance(self, slot: Slot) -> None:
        """``slot`` was the last one to come: send what is now complete."""
        self._select_alone(slot)
        while (buffer := len(self._pending)) < len(self._missing) and self._missing[buffer] == 0:
            self.recorder.mark(buffer)
            self._send(buffer)

    def _drain(self) -> None:
        """Every tensor has come: leave no message that has not been started."""

    def _compensate(self, slot: Slot, gradient: torch.Tensor | None) -> None:
        if self.dirty:
            return
        if gradient is not None and slot.index in self.session.small:
            self._small.setdefault(self.session.buffer_of[slot.index], []).append((slot, gradient))
            return
        taken = self._of_work.compensate(self.session.arena_of[slot.index], slot, gradient)
        if taken and self.session.energy is not None and slot.lane.sparse:
            self.session.energy.add(slot, gradient)

    def _catch_up(self, buffer: int) -> None:
        """Put all small tensors of a merge buffer that are sent whole into their arenas together."""
        by_arena: dict[Lane, list[tuple[Slot, torch.Tensor]]] = {}
        for slot, gradient in self._small.pop(buffer, ()):
            by_arena.setdefault(slot.lane, []).append((slot, gradient))
        for lane, taken in by_arena.items():
            self._of_work.take(self.session.arenas[lane], taken)

    def _select_alone(self, slot: Slot) -> None:
        alone = self.session.alone.get(slot.index)
        if alone is not None:
            self._offers[slot.index] = self._select(alone)

    def _send(self, buffer: int) -> None:
        """One message after the other: the next is selected and encoded while the one before travels."""
        self._catch_up(buffer)
        first, *others = self.session.messages[buffer]
        messages = [(first, self._start(first))]
        self.recorder.mark(buffer)
        messages += [(route, self._start(route)) for route in others]
        self._pending.append(messages)

    def _look(self) -> None:
        """See what has arrived: without it, nothing would be known of exchanges that backward hides."""
        while self._arrived < len(self._pending):
            for route, pending in self._pending[self._arrived]:
                if not route.exchange.arrived(pending):
                    return
            self.recorder.arrived()
            self._arrived += 1

    def complete(self, gradient_of: Callable[[torch.Tensor], torch.Tensor | None]) -> bool:
        """Collective. Feed the tensors that are missing and write every update; False, nothing written: repeat."""
        for slot, parameter in zip(self.session.layout.slots, self.session.parameters, strict=True):
            if slot.index not in self._fed:
                self.feed(parameter, None if self.dirty else gradient_of(parameter))
        self._drain()
        agreed = True
        for buffer, messages in enumerate(self._pending):
            self.recorder.mark(buffer)
            controls = [route.exchange.wait(pending) for route, pending in messages]
            for _, pending in messages:
                self._count(pending)  # what has been sent since it was started
            self.recorder.mark(buffer)
            self._look()
            if buffer == 0:  # a flag is in all messages of its rank, so all ranks see it here
                for control in controls:
                    self.said |= control.flags
                agreed = not self.said & Flag.REPLAN
            for control in controls:
                self.nonfinite |= bool(control.flags & Flag.NONFINITE)
            if agreed:
                for (route, pending), control in zip(messages, controls, strict=True):
                    if not self.nonfinite:
                        route.exchange.finish(pending)
                    for slot, used in zip(route.slots, control.used, strict=True):
                        self.used[slot.index] |= used
            self.recorder.mark(buffer)
            self._look()
        if agreed and not self.nonfinite:
            self.stats.sent(self.session.correct(self.used), 0)
            self._of_work.clean(self.session.arenas)
        return agreed

    def left_over(self, slot: Slot) -> bool:
        """Tell whether a tensor that no rank used has an update all the same: see :meth:`MergeBuffers.moves`."""
        return not self.nonfinite and self.session.moves(slot)

    def withdraw(self) -> None:
        """If the attempt comes to nothing, leave nothing of it but the updates."""
        if self.nonfinite and self.session.config.sparsifier is not None:
            self.session.config.sparsifier.load_state_dict(self._known)

    def _control(self, buffer: int, used: tuple[bool, ...], device: torch.device) -> RoundHeader:
        flags = self.flags | (Flag.REPLAN if self.dirty else 0) | (Flag.NONFINITE if self.watch.found else 0)
        return RoundHeader(self.step, self.session.fingerprint, buffer, flags, used, self.watch.alarm(device))

    def _start(self, route: Message) -> InFlight:
        loads = [self.session.load(segment) for segment in route.segments]
        offers = [self._offer(segment) if route.exchange.sparse else None for segment in route.segments]
        used = tuple(self._fed[slot.index] for slot in route.slots)
        control = self._control(route.buffer, used, loads[0].work.device)
        pending = route.exchange.start(route.name, loads, offers, control)
        self._count(pending)
        return pending

    def _count(self, pending: InFlight) -> None:
        """Put into the totals what is new of a message: some go on sending after their start."""
        size, elements = self._counted.get(id(pending), (0, 0))
        if (pending.bytes, pending.elements) != (size, elements):
            self.stats.sent(pending.bytes - size, pending.elements - elements, None if size else pending.codecs)
            self._counted[id(pending)] = (pending.bytes, pending.elements)

    def _offer(self, segment: Segment) -> Selection | None:
        """What is sent of a segment; None: all of it."""
        if not segment.lane.sparse or self.session.config.sparsifier is None:
            return None
        first = segment.slots[0].index
        return self._offers.pop(first) if first in self.session.alone else self._select(segment)

    def _select(self, segment: Segment) -> Selection:
        sparsifier = self.session.config.sparsifier
        assert sparsifier is not None
        work, k, shapes = self.session.vector(segment, self.step)
        if self.dirty:
            capacity = sparsifier.capacity(work.numel(), k=k, step=self.step, shapes=shapes)
            return Selection(torch.zeros(capacity, dtype=torch.int32, device=work.device), 0)
        chosen = sparsifier.select(work, k=k, key=key(segment), step=self.step, shapes=shapes)
        if self.stats.proof is not None:
            self.stats.proof.observe(key(segment), work, chosen, shapes)
        # A mask is for all ranks alike: what one of them would add is not sent.
        return chosen if self.session.config.exchange == "masked" else self._of_work.offered(segment, work, chosen)
