# SPDX-License-Identifier: Apache-2.0
"""Streams and events of devices. No other module names them, so that a test can stand in for a device.

A device runs the work of one stream in order, and streams side by side. An event marks a place in a stream:
another stream, or the host, can wait until the device has got there.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

import torch

SHORTEST, LONGEST = 20e-6, 1e-3  # seconds that the host sleeps between two looks at an event
SHARE = 0.01  # of the seconds waited so far: the next sleep, so that a wait ends by so much too late at most


class Streams(ABC):
    """Streams and events of one kind of device. Callers do not look inside these objects of torch."""

    @abstractmethod
    def is_current(self, device: torch.device) -> bool:
        """Return whether ``device`` is the one that this thread uses where it names none."""

    @abstractmethod
    def current(self, device: torch.device) -> Any:
        """Return the stream of ``device`` that this thread queues into now."""

    @abstractmethod
    def number(self, device: torch.device) -> int:
        """Return what tells :meth:`current` from the other streams of ``device``, for the price of a look."""

    @abstractmethod
    def new(self, device: torch.device) -> Any:
        """Return a new stream; its kernels go before those of others."""

    @abstractmethod
    def within(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which this thread queues into ``stream``."""

    @abstractmethod
    def record(self, stream: Any, *, timed: bool = False) -> Any:
        """Return an event behind all that is queued in ``stream``. ``timed``: :meth:`seconds` can read it."""

    @abstractmethod
    def seconds(self, earlier: Any, later: Any) -> float:
        """Wait for two timed events of one device; return the seconds between them."""

    @abstractmethod
    def wait(self, stream: Any, event: Any) -> None:
        """Make work that is queued in ``stream`` from now on wait for ``event``. The host does not wait."""

    @abstractmethod
    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep the memory of ``tensor``, even when it is freed, until ``stream`` has got through what is queued now."""

    @abstractmethod
    def has_ended(self, event: Any) -> bool:
        """Return whether the device has got to ``event``, without waiting."""

    @abstractmethod
    def pinned(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros in memory of the host that copies with ``non_blocking=True`` do not wait for, 1-D."""

    @abstractmethod
    def is_capturing(self) -> bool:
        """Return whether the work that this thread queues is captured in a graph, and not done now."""

    def wait_on_host(self, event: Any, timeout: float) -> bool:
        """Wait until the device has got to ``event``, ``timeout`` seconds at most; return whether it has."""
        began = time.monotonic()
        while not self.has_ended(event):
            waited = time.monotonic() - began
            if waited > timeout:
                return False
            time.sleep(min(max(SHORTEST, SHARE * waited), LONGEST))
        return True


class CudaStreams(Streams):
    """Streams and events of CUDA."""

    def is_current(self, device: torch.device) -> bool:
        return device.index in (None, torch.cuda.current_device())

    def current(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.current_stream(device)

    def number(self, device: torch.device) -> int:
        # A stream object takes some microseconds, and every gradient asks.
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        return int(raw(device.index) if raw else self.current(device).cuda_stream)

    def new(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def within(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def record(self, stream: torch.cuda.Stream, *, timed: bool = False) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def seconds(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
        for event in (earlier, later):
            event.synchronize()
        return float(earlier.elapsed_time(later)) / 1e3

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def keep(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        tensor.record_stream(stream)

    def has_ended(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())  # type: ignore[no-untyped-call]

    def pinned(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, pin_memory=True)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


_kinds: dict[str, Streams] = {"cuda": CudaStreams()}  # by type of device; written by register alone


def register(kind: str, streams: Streams) -> None:
    """Register ``streams`` for devices of the type ``kind``, such as ``"cuda"``."""
    _kinds[kind] = streams


def streams_of(device: torch.device) -> Streams | None:
    """Return the streams of a device's kind; None where the host computes, or none are known."""
    return _kinds.get(device.type)
