"""One attempt to exchange the gradients of one step: tensors in, messages out in plan order, updates back.

Until every message of the first merge buffer is known, nothing that an attempt writes is visible: gradients
and residuals are as they were, so an attempt can be discarded and repeated after a new agreement.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from agmerge.exchanges import Pending
from agmerge.session import Route, Session
from agmerge.stats import Stats
from agmerge.wire import RELAYOUT, Control
from sparsifiers import Selection, budget


class Round:
    """An attempt at step ``step`` in ``session``.

    ``dirty``: this rank's parameters are no longer those of the session. It sends what the plan asks for, but
    empty, and says so in every message; then all ranks discard the attempt.
    """

    def __init__(self, session: Session, step: int, stats: Stats, *, dirty: bool) -> None:
        self.session, self.step, self.stats, self.dirty = session, step, stats, dirty
        self._missing = list(session.plan.counts)  # tensors still to come, per merge buffer
        self._fed: dict[int, bool] = {}  # by slot: whether there was a gradient
        self._pending: list[tuple[Route, Pending]] = []
        self._next = 0

    def feed(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """The gradient of one tensor is ready (None: it has none); send what is now complete."""
        slot = self.session.slot_of[parameter]
        if not self.dirty:
            self.session.arenas[slot.lane].compensate(slot, gradient)
        self._fed[slot.index] = gradient is not None
        self._missing[self.session.buffer_of[slot.index]] -= 1
        while self._next < len(self._missing) and self._missing[self._next] == 0:
            for route in self.session.buffers[self._next]:
                self._pending.append((route, self._start(route)))
            self._next += 1

    def complete(self, gradient_of: Callable[[torch.Tensor], torch.Tensor | None]) -> bool:
        """Feed the tensors that are missing and write every update; False, with nothing written, to repeat."""
        for slot, parameter in zip(self.session.layout.slots, self.session.parameters, strict=True):
            if slot.index not in self._fed:
                self.feed(parameter, None if self.dirty else gradient_of(parameter))
        agreed = True
        for number, (route, pending) in enumerate(self._pending):
            begin = time.perf_counter()
            control = route.exchange.wait(pending)
            self.stats.exposed_seconds += time.perf_counter() - begin
            if number == 0:
                agreed = not control.flags & RELAYOUT  # a flag is in all messages of its rank, so all ranks see it here
            if agreed:
                route.exchange.finish(pending)
                for slot, used in zip(route.slots, control.used, strict=True):
                    self.session.used[slot.index] |= used
        if agreed:
            self.session.correct()
        return agreed

    def _start(self, route: Route) -> Pending:
        loads = [self.session.load(segment) for segment in route.segments]
        offers = [self._offer(route, index, load.work) for index, load in enumerate(loads)]
        used = tuple(self._fed[slot.index] for slot in route.slots)
        flags = RELAYOUT if self.dirty else 0
        control = Control(self.step, self.session.fingerprint, route.buffer, flags, used)
        pending = route.exchange.start(route.name, loads, offers, control)
        self.stats.sent(pending.bytes, pending.elements)
        return pending

    def _offer(self, route: Route, index: int, work: torch.Tensor) -> Selection | None:
        segment, sparsifier = route.segments[index], self.session.config.sparsifier
        if not segment.lane.sparse or sparsifier is None:
            return None
        k, shapes = budget(self.session.config.density(segment.lane.density, self.step), segment.numel), segment.shapes
        if k == segment.numel:
            k = segment.length  # everything, padding too: else it could be chosen in place of an element
        if self.dirty:
            capacity = sparsifier.capacity(segment.length, k=k, step=self.step, shapes=shapes)
            return Selection(torch.zeros(capacity, dtype=torch.int32, device=work.device), 0)
        chosen = sparsifier.select(work, k=k, key=route.key(segment), step=self.step, shapes=shapes)
        if self.stats.proof is not None:
            self.stats.proof.observe(route.key(segment), work, chosen, shapes)
        return chosen
