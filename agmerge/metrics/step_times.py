# SPDX-License-Identifier: Apache-2.0
"""Times of this rank's steps, and in each the moments at which tensors were ready, selected, sent and received.

Marks in time are made on the host or in the stream of a device; making one never waits for anything.
"""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
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


class StepRecorder:
    """Recorder of the marks of a step, for n tensors and m merge buffers; those of a stopped clock cannot be read."""

    def __init__(self, clock: Clock, tensors: int, buffers: int) -> None:
        self.clock, self._now, self._shape = clock, clock.mark, (tensors, buffers)
        self.began = 0.0  # when the first tensor was handed over, in seconds since the epoch
        self._origin: Any = None  # the mark of that moment
        self._slots: list[int] = []  # of the tensors, as they came
        self._ready: list[Any] = []  # a mark each, in that order
        self._resumed: list[Any] = []  # likewise
        self._buffers: list[list[Any]] = [[] for _ in range(buffers)]  # five marks each: ``complete`` to ``written``
        self._arrived: list[Any] = []  # of merge buffers, in plan order, as far as they were seen to arrive

    def begin(self) -> None:
        """Record that a tensor is handed over; the first one's mark is the origin of all times."""
        if self._origin is None:
            self.began, self._origin = time.time(), self._now()

    def ready(self, slot: int) -> None:
        """Record that the tensor has been accumulated."""
        self._slots.append(slot)
        self._ready.append(self._now())

    def resumed(self) -> None:
        """Record that all work for the tensor is done; backward goes on."""
        self._resumed.append(self._now())

    def arrived(self) -> None:
        """Record that the next merge buffer's exchange was seen to have ended before the wait for it.

        What the host sees says nothing of a device, which is far behind: there an exchange ends when it is received.
        """
        if not self.clock.on_device:
            self._arrived.append(self._now())

    def mark(self, buffer: int) -> None:
        """Record the next event of a merge buffer, in the order of the fields of :class:`StepTimes`."""
        self._buffers[buffer].append(self._now())

    def times(self) -> StepTimes:
        """Return the times from the marks, once the step is complete. May wait for the device."""
        n, m = self._shape
        marks = self.clock.since(self._origin, self._ready)
        resumed = self.clock.since(self._origin, self._resumed)
        ready, since = np.zeros(n), np.zeros(n)
        since[self._slots] = marks
        ready[self._slots] = np.cumsum(np.maximum(marks - np.concatenate([[0.0], resumed[:-1]]), 0.0))
        columns = self.clock.since(self._origin, [mark for marks in self._buffers for mark in marks])
        complete, handed, waiting, received, written = columns.reshape(m, 5).T
        arrived = received.copy()
        arrived[: len(self._arrived)] = self.clock.since(self._origin, self._arrived)
        return StepTimes(ready, since, complete, handed, waiting, received, written, arrived)
