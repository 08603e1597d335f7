# SPDX-License-Identifier: Apache-2.0
"""Two GPUs that are not there: what ``torch.cuda`` is asked for is written down, and takes virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

RATE = 1.0e9  # cycles a second of a spinning kernel


class Stream:
    """A queue of one GPU. ``end``: the virtual second at which all that is in it is done."""

    def __init__(self, cuda: Cuda, index: int, priority: int = 0) -> None:
        self.cuda, self.device_index, self.priority, self.end = cuda, index, priority, 0.0
        self.cuda_stream = id(self)

    def wait_event(self, event: Event) -> None:
        """Queue a wait for ``event`` in front of later work."""
        self.cuda.log.append("wait_event")
        self.end = max(self.end, event.at)

    def synchronize(self) -> None:
        """Advance the host's time to the end of what is waited for."""
        self.cuda.now = max(self.cuda.now, self.end)


class Event:
    """A place in a stream, of that stream's GPU."""

    def __init__(self, cuda: Cuda, enable_timing: bool = False) -> None:
        self.cuda, self.is_timed, self.index, self.at = cuda, enable_timing, -1, 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Record the event in ``stream``; without one, as torch does, in the current device's current stream."""
        stream = stream or self.cuda.current_stream()
        self.index, self.at = stream.device_index, max(stream.end, self.cuda.now)
        self.cuda.log.append(f"record on {self.index}")

    def query(self) -> bool:
        """Whether the GPU has got there."""
        return self.at <= self.cuda.now

    def synchronize(self) -> None:
        """Advance the host's time to the end of what is waited for."""
        self.cuda.now = max(self.cuda.now, self.at)

    def elapsed_time(self, later: Event) -> float:
        """Milliseconds; RuntimeError for what torch refuses."""
        if not (self.is_timed and later.is_timed):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if -1 in (self.index, later.index):
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        if self.index != later.index:
            raise RuntimeError(f"Event device type CUDA index {later.index} does not match {self.index}")
        if not (self.query() and later.query()):
            raise RuntimeError("CUDA error: device not ready")
        return 1e3 * (later.at - self.at)


class Cuda:
    """What stands in the place of ``torch.cuda``'s functions. ``stats``: what :meth:`memory_stats` returns."""

    def __init__(self, count: int = 2) -> None:
        self.count, self.device, self.now = count, 0, 0.0
        self.log: list[str] = []
        self.stats: dict[str, int] = {"segment.all.allocated": 0, "allocation.all.allocated": 0}
        self.peak = 0
        self.modes: list[str] = []  # of sync debugging
        self._current = [Stream(self, index) for index in range(count)]

    def index_of(self, device: Any) -> int:
        """Return a GPU's number; the current one's where there is none."""
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
        return self.device if found.index is None else found.index

    def current_device(self) -> int:
        return self.device

    def set_device(self, device: Any) -> None:
        index = self.index_of(device)
        if index >= self.count:
            raise RuntimeError("CUDA error: invalid device ordinal")
        self.device = index

    def current_stream(self, device: Any = None) -> Stream:
        return self._current[self.index_of(device)]

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, device = self._current[stream.device_index], self.device
        self._current[stream.device_index], self.device = stream, stream.device_index
        try:
            yield
        finally:
            self._current[stream.device_index], self.device = before, device

    def spin(self, cycles: int) -> None:
        """Queue a kernel that counts so far."""
        stream = self.current_stream()
        stream.end = max(stream.end, self.now) + cycles / RATE
        self.log.append(f"spin on {stream.device_index}")

    def synchronize(self, device: Any = None) -> None:
        self.now = max(self.now, *(stream.end for stream in self._current))

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return dict(self.stats)

    def max_memory_allocated(self, device: Any = None) -> int:
        return self.peak

    def set_sync_debug_mode(self, mode: str) -> None:
        self.modes.append(mode)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace ``torch.cuda``'s functions while a test runs."""
        own: dict[str, Any] = {
            "is_available": lambda: True,
            "device_count": lambda: self.count,
            "Stream": lambda device=None, priority=0: Stream(self, self.index_of(device), priority),
            "Event": lambda enable_timing=False: Event(self, enable_timing),
            "_sleep": self.spin,
            "reset_peak_memory_stats": lambda device=None: None,
            "is_current_stream_capturing": lambda: False,
            "get_device_properties": lambda device: SimpleNamespace(
                name="Recorded", major=9, minor=0, total_memory=2**36, L2_cache_size=1 << 12, multi_processor_count=1
            ),
        }
        names = ("current_device", "set_device", "current_stream", "stream", "synchronize", "memory_stats")
        own |= {name: getattr(self, name) for name in (*names, "max_memory_allocated", "set_sync_debug_mode")}
        for name, function in own.items():
            monkeypatch.setattr(torch.cuda, name, function, raising=False)
