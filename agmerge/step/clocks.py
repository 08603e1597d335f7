# SPDX-License-Identifier: Apache-2.0
"""Clocks of a step: a device has its own, and all else goes by the host's."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from agmerge.backends.streams import Streams, streams_of
from agmerge.metrics.step_times import Clock, Seconds


class HostClock(Clock):
    """Clock of the host, for tensors on the host."""

    def mark(self) -> float:
        return time.perf_counter()

    def since(self, origin: float, marks: Sequence[float]) -> Seconds:
        return np.array(marks, dtype=np.float64) - origin


class DeviceClock(Clock):
    """Clock of one device, with events in its current stream: they tell when it gets there, not when the host asked.

    An event that tells time takes the host some microseconds to make, and there are two for each tensor. ``streams``:
    of the device's kind.
    """

    on_device = True

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self._device, self._streams = device, streams

    def mark(self) -> Any:
        return self._streams.record(self._streams.current(self._device), timed=True)

    def since(self, origin: Any, marks: Sequence[Any]) -> Seconds:
        return np.array([self._streams.seconds(origin, mark) for mark in marks], dtype=np.float64)


def clock_for(devices: Iterable[torch.device]) -> Clock:
    """Return the clock of the only device; with several, which have no time in common, the host's."""
    distinct = set(devices)
    if len(distinct) == 1 and (streams := streams_of(device := distinct.pop())) is not None:
        return DeviceClock(device, streams)
    return HostClock()
