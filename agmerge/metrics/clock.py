"""Marks in time, on the host or in the stream of a device. Making one never waits for anything."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
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
