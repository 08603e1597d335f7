# SPDX-License-Identifier: Apache-2.0
"""Times of this rank's steps, and in each the moments at which tensors were ready, selected, sent and received.

Marks in time are made on the host or in the stream of a device; making one never waits for anything.
"""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

# Whole steps, from the end of one to the end of the next, as a user sees them.

KEEP = 50  # steps: the median is of no more


class WholeSteps:
    """Durations of this rank's last steps. Time between ``end`` and ``begin`` does not count."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._began = time.perf_counter()

    def begin(self) -> None:
        """Begin the next step now."""
        self._began = time.perf_counter()

    def end(self) -> None:
        """Count a step that has ended."""
        self._seconds = [*self._seconds[1 - KEEP :], time.perf_counter() - self._began]

    def typical(self) -> float:
        """Return the median in seconds; 0 before the first step has ended."""
        return statistics.median(self._seconds) if self._seconds else 0.0


# One step.

Seconds = NDArray[np.float64]  # durations, or times since an origin that the context names


class Clock(ABC):
    """Clock that makes marks, and returns the time between two of them later."""

    on_device: ClassVar[bool] = False  # marks tell when a device gets there; each costs the host some microseconds
    measures: ClassVar[bool] = True  # marks can be read

    @abstractmethod
    def mark(self) -> Any:
        """Return a mark of now, without waiting, which only this clock can read."""

    @abstractmethod
    def since(self, origin: Any, marks: Sequence[Any]) -> Seconds:
        """Return the seconds from ``origin`` to each mark, (k,). May wait for the device: not for hooks."""


class StoppedClock(Clock):
    """Clock for a step that is not measured."""

    measures = False

    def mark(self) -> None:
        return None

    def since(self, origin: None, marks: Sequence[None]) -> Seconds:
        raise ValueError("the step was not measured")


@dataclass(frozen=True)
class StepTimes:
    """Times of one step, in seconds since its first tensor was handed over: n tensors, m merge buffers."""

    ready: Seconds  # (n,), when each tensor was ready, selecting and sending of earlier ones not counted
    since: Seconds  # (n,), the same with everything counted
    complete: Seconds  # (m,), when the last tensor of a merge buffer was ready
    handed: Seconds  # (m,), when its message, the first of several, was under way
    waiting: Seconds  # (m,), when the wait for it began
    received: Seconds  # (m,), when that wait ended
    written: Seconds  # (m,), when its update was written
    arrived: Seconds  # (m,), when its exchange was first seen to have ended: by a poll of the host, or by the wait

    @property
    def finish(self) -> float:
        """Return when the last exchange ended."""
        return float(self.arrived[-1])

    @property
    def exposed(self) -> Seconds:
        """Return the seconds waited for each merge buffer, (m,)."""
        return self.received - self.waiting

    @property
    def making(self) -> Seconds:
        """Return the seconds from each merge buffer's last tensor to its message, the first of several, (m,)."""
        return self.handed - self.complete

    @property
    def travel(self) -> Seconds:
        """Return the seconds that each exchange took, once those before it had ended, (m,): a hook too long at most."""
        return np.asarray(self.arrived - np.maximum(self.handed, np.concatenate([[0.0], self.arrived[:-1]])))


class Event(Enum):
    """What happens to a tensor, or to a merge buffer, in a step."""

    READY = auto()  # the tensor was accumulated
    RESUMED = auto()  # all work for the tensor is done, and backward continues
    REACHED = auto()  # the merge buffer has reached the next of ``complete`` to ``written``, see :class:`StepTimes`
    ARRIVED = auto()  # the merge buffer's exchange was seen to have ended before the wait for it


class StepRecorder:
    """Record of the events of a step, for n tensors and m merge buffers; those of a stopped clock cannot be read.

    ``note((event, number, now()))``: record an event of the tensor, or of the merge buffer, of that number. Hooks do
    so some times a tensor, so ``note`` is a list's own, which takes no call in Python.
    """

    def __init__(self, clock: Clock, tensors: int, buffers: int) -> None:
        self.clock, self.now, self._shape = clock, clock.mark, (tensors, buffers)
        self.began = 0.0  # when the first tensor was handed over, in seconds since the epoch
        self._origin: Any = None  # the mark of that moment
        self._events: list[tuple[Event, int, Any]] = []  # with a mark each, as they came
        self.note: Callable[[tuple[Event, int, Any]], None] = self._events.append

    def begin(self) -> None:
        """Record that a tensor is handed over; the first one's mark is the origin of all times."""
        if self._origin is None:
            self.began, self._origin = time.time(), self.now()

    def times(self) -> StepTimes:
        """Return the times from the marks, once the step is complete. May wait for the device.

        An exchange that was not seen to have ended earlier has ended when it was received.
        """
        n, m = self._shape
        slots: list[int] = []
        of: dict[Event, list[Any]] = {event: [] for event in Event}  # marks as they came
        reached: list[list[Any]] = [[] for _ in range(m)]  # of merge buffers, five each
        for event, number, mark in self._events:
            if event is Event.REACHED:
                reached[number].append(mark)
                continue
            of[event].append(mark)
            if event is Event.READY:
                slots.append(number)
        marks, resumed, seen = (
            self.clock.since(self._origin, of[event]) for event in (Event.READY, Event.RESUMED, Event.ARRIVED)
        )
        ready, since = np.zeros(n), np.zeros(n)
        since[slots] = marks
        ready[slots] = np.cumsum(np.maximum(marks - np.concatenate([[0.0], resumed[:-1]]), 0.0))
        columns = self.clock.since(self._origin, [mark for marks in reached for mark in marks])
        complete, handed, waiting, received, written = columns.reshape(m, 5).T
        arrived = received.copy()
        arrived[: len(seen)] = seen
        return StepTimes(ready, since, complete, handed, waiting, received, written, arrived)
