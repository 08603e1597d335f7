"""Pretended events: the library's clocks mark time with them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from pretend.device import current


class Event:
    """Stand for ``torch.Event``: what was queued before it has ended as soon as it is recorded."""

    def __init__(self, device: Any = None, *, enable_timing: bool = False, **others: Any) -> None:
        self._at: float | None = None  # seconds of the host's clock
        self._until = 0  # kernels that were queued before it

    def record(self, stream: Any = None) -> None:
        """Mark now."""
        self._at, self._until = time.perf_counter(), current().books.queued

    def query(self) -> bool:
        """Whether the device has got there."""
        return True

    def synchronize(self) -> None:
        """Let the host wait until the device has got there."""
        current().books.waited("Event.synchronize", self._until)

    def elapsed_time(self, later: Event) -> float:
        """Milliseconds from this event to ``later``."""
        assert self._at is not None and later._at is not None, "an event was never recorded"
        return 1e3 * (later._at - self._at)


def _synchronize(device: Any = None) -> None:
    current().books.waited("synchronize")


@contextmanager
def installed() -> Iterator[None]:
    """Let torch have these events, and count what waits for the whole device."""
    with patch.object(torch, "Event", Event), patch.object(torch.accelerator, "synchronize", _synchronize):
        yield
