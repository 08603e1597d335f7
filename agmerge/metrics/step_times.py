"""When tensors were ready and merge buffers selected, sent and received, in one step of this rank.

Marks in time are made on the host or in the stream of a device; making one never waits for anything.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Seconds = NDArray[np.float64]


class Clock(ABC):
    """Makes marks; says afterwards what lies between two of them."""

    @abstractmethod
    def mark(self) -> Any:
        """Now."""

    @abstractmethod
    def since(self, origin: Any, marks: Sequence[Any]) -> Seconds:
        """Seconds from ``origin`` to each mark. May wait until the device has got there: not for hooks."""


class HostClock(Clock):
    """Wall-clock time, where the host computes by itself."""

    def mark(self) -> float:
        return time.perf_counter()

    def since(self, origin: float, marks: Sequence[float]) -> Seconds:
        return np.array(marks, dtype=np.float64) - origin


class DeviceClock(Clock):
    """Events in the current stream of one device: when the device gets there, not when the host asked for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def since(self, origin: torch.Event, marks: Sequence[torch.Event]) -> Seconds:
        for mark in marks:
            mark.synchronize()
        return np.array([origin.elapsed_time(mark) / 1e3 for mark in marks], dtype=np.float64)


def clock_for(devices: Iterable[torch.device]) -> Clock:
    """The clock of the only device there is; with several, which have no time in common, the host's."""
    found = set(devices)
    if len(found) == 1 and (device := found.pop()).type not in ("cpu", "meta"):
        return DeviceClock(device)
    return HostClock()


@dataclass(frozen=True)
class StepTimes:
    """One step, in seconds since its first tensor was handed over. n tensors, m merge buffers.

    ready: (n,), when each tensor was ready, selecting and sending of earlier ones not counted.
    since: (n,), the same with everything counted.
    complete, handed: (m,), when the last tensor of a merge buffer was there, and when its message, the first of
        several, was under way.
    waiting, received, written: (m,), when the wait for it began and ended, and when its update was written.
    arrived: (m,), when its exchange was first seen to have ended: by a look in between, or by the wait for it.
    """

    ready: Seconds
    since: Seconds
    complete: Seconds
    handed: Seconds
    waiting: Seconds
    received: Seconds
    written: Seconds
    arrived: Seconds

    @property
    def finish(self) -> float:
        """When the last exchange ended."""
        return float(self.arrived[-1])

    @property
    def exposed(self) -> Seconds:
        """Seconds waited for each merge buffer, (m,)."""
        return self.received - self.waiting

    @property
    def travel(self) -> Seconds:
        """Seconds that each exchange took, once those before it had ended, (m,): a hook too long at most."""
        return np.asarray(self.arrived - np.maximum(self.handed, np.concatenate([[0.0], self.arrived[:-1]])))


class StepRecorder:
    """Takes the marks of a step, for n tensors and m merge buffers."""

    def __init__(self, clock: Clock, tensors: int, buffers: int) -> None:
        self.clock, self._shape = clock, (tensors, buffers)
        self.began = 0.0  # seconds since the epoch
        self._begun: Any = None
        self._slots: list[int] = []  # as they came
        self._ready: list[Any] = []
        self._resumed: list[Any] = []
        self._buffers: list[list[Any]] = [[] for _ in range(buffers)]
        self._arrived: list[Any] = []

    def begin(self) -> None:
        """A tensor is handed over; the first one's is the origin of all times."""
        if self._begun is None:
            self.began, self._begun = time.time(), self.clock.mark()

    def ready(self, slot: int) -> None:
        """The tensor has been compensated."""
        self._slots.append(slot)
        self._ready.append(self.clock.mark())

    def resumed(self) -> None:
        """All that was to do for the tensor is done; backward goes on."""
        self._resumed.append(self.clock.mark())

    def arrived(self) -> None:
        """The next merge buffer's exchange was seen to have ended before anybody waited for it."""
        self._arrived.append(self.clock.mark())

    def mark(self, buffer: int) -> None:
        """The next thing has happened to a merge buffer, in the order of the fields of :class:`StepTimes`."""
        self._buffers[buffer].append(self.clock.mark())

    def times(self) -> StepTimes:
        """What the marks say, once the step is complete."""
        n, m = self._shape
        marks = self.clock.since(self._begun, self._ready)
        resumed = self.clock.since(self._begun, self._resumed)
        ready, since = np.zeros(n), np.zeros(n)
        since[self._slots] = marks
        ready[self._slots] = np.cumsum(np.maximum(marks - np.concatenate([[0.0], resumed[:-1]]), 0.0))
        columns = self.clock.since(self._begun, [mark for marks in self._buffers for mark in marks])
        complete, handed, waiting, received, written = columns.reshape(m, 5).T
        arrived = received.copy()
        arrived[: len(self._arrived)] = self.clock.since(self._begun, self._arrived)
        return StepTimes(ready, since, complete, handed, waiting, received, written, arrived)
