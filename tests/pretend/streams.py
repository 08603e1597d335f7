# SPDX-License-Identifier: Apache-2.0
"""Pretended streams and events, in the place of torch's and of the library's own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from agmerge.backends import streams
from pretend.clocks import Clock, Stream
from pretend.device import current
from pretend.registration import NAME, install


class Event:
    """Stand for ``torch.Event``: a place in a stream, which has come when the device's kernels before it have ended."""

    def __init__(self, device: Any = None, *, enable_timing: bool = False, **others: Any) -> None:
        self._at: float | None = None  # seconds of the host's clock
        self.clock: Clock = {}  # of the stream, when it was recorded

    def record(self, stream: Stream | None = None) -> None:
        """Mark what is queued now."""
        self._at, self.clock = time.perf_counter(), dict((stream or current().stream).clock)

    def query(self) -> bool:
        """Whether the device has got there: then the host knows."""
        return current().looks(self.clock)

    def synchronize(self) -> None:
        """Let the host wait until the device has got there."""
        current().wait_on_host("Event.synchronize", self.clock)

    def elapsed_time(self, later: Event) -> float:
        """Milliseconds from this event to ``later``; RuntimeError where the host does not know that both have come."""
        if self._at is None or later._at is None or not (current().knows(self.clock) and current().knows(later.clock)):
            raise RuntimeError("an event was never recorded, or not waited for")
        return 1e3 * (later._at - self._at)


class DeviceStreams(streams.Streams):
    """Offer the streams and events of the thread's pretended device."""

    def is_current(self, device: torch.device) -> bool:
        return True

    def current(self, device: torch.device) -> Stream:
        return current().stream

    def number(self, device: torch.device) -> int:
        return id(current().stream)

    def new(self, device: torch.device) -> Stream:
        return current().new_stream("lane")

    def within(self, stream: Stream) -> AbstractContextManager[Any]:
        return current().within(stream)

    def record(self, stream: Stream, *, timed: bool = False) -> Event:
        event = Event(enable_timing=timed)
        event.record(stream)
        return event

    def seconds(self, earlier: Event, later: Event) -> float:
        for event in (earlier, later):
            event.synchronize()
        return earlier.elapsed_time(later) / 1e3

    def wait(self, stream: Stream, event: Event) -> None:
        current().wait(stream, event.clock)

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        return

    def has_ended(self, event: Event) -> bool:
        return event.query()

    def pinned(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return current().pinned.allocate(size, dtype)

    def is_capturing(self) -> bool:
        return current().is_capturing

    def wait_on_host(self, event: Event, timeout: float) -> bool:
        return current().wait_on_host("Event.synchronize", event.clock, timeout)


def _synchronize(device: Any = None) -> None:
    current().wait_for_all("synchronize")


@contextmanager
def installed() -> Iterator[None]:
    """Let torch and the library have these streams and events."""
    install()
    streams.register(NAME, DeviceStreams())
    with patch.object(torch, "Event", Event), patch.object(torch.accelerator, "synchronize", _synchronize):
        yield
