# SPDX-License-Identifier: Apache-2.0
"""Devices: their streams and events, whether workers share them, and a thread that makes a library's calls.

No other module names streams and events, so that a test can stand in for a device. A device runs the work of one stream
in order, and streams side by side. An event marks a place in a stream: another stream, or the host, can wait until the
device has got there.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import json
import os
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

# Thread for the calls of a library: it makes them one after the other, and polls those that are under way.

PAUSE = 5e-5  # seconds between two looks at calls under way: costs little, and adds little to a message


class Request(Protocol):
    """Request of a call that has begun."""

    def Test(self) -> bool:  # the name is MPI's
        """Return whether it has ended; finish it, or raise its error."""


class Call:
    """Call that was handed in. ``make``: begins it, and returns its request; None: it has ended."""

    def __init__(self, make: Callable[[], Request | None]) -> None:
        self._make = make
        self._request: Request | None = None  # once the call has begun; None: it has not, or needs none
        self.begun = threading.Event()  # set once it has begun, or could not
        self.error: Exception | None = None  # what it raised, once it has ended
        self.ended = threading.Event()

    def running(self) -> bool:
        """Begin, or go on; return False when it has ended. On the thread only."""
        try:
            if not self.begun.is_set():
                self._request = self._make()
                self.begun.set()
            if self._request is not None and not self._request.Test():
                return True
        except Exception as error:
            self.error = error
        self.begun.set()  # in vain, perhaps: the error is there then
        self.ended.set()
        return False


class Progress:
    """Thread that makes calls, in the order in which they were handed in. ``name``: the thread's."""

    def __init__(self, name: str) -> None:
        self._calls: deque[Call] = deque()  # handed in, not begun
        self._wake = threading.Event()  # set when a call is handed in, or the end has come
        self._end = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        atexit.register(self.end)  # runs before the library's own handlers, which may finalise it

    def start(self, make: Callable[[], Request | None]) -> Call:
        """Hand in ``make()``: the thread calls it, and tests the request that it returns until that has ended."""
        call = Call(make)
        self._calls.append(call)
        self._wake.set()
        return call

    def end(self) -> None:
        """Stop the thread; calls that are under way stay unfinished, and their buffers are never freed."""
        self._end = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        """Make calls and test those that are under way, until the end of the process."""
        # Not queue.SimpleQueue.get(timeout): with time-outs as short as these CPython 3.11's can wait for ever.
        active: list[Call] = []
        while not self._end:
            if active and not self._calls:
                time.sleep(PAUSE)
            elif not self._calls:
                self._wake.wait()
                self._wake.clear()
            while self._calls:
                active.append(self._calls.popleft())
            active = [call for call in active if call.running()]
        for call in active:
            # The library may write to their buffers until it is finalised, which is after all objects have been freed.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(call))


# GPUs that several workers share: NCCL takes one rank for each GPU, so tensors go through the host's memory there.

SHARED = (
    "AGM708: {workers} workers share {gpus} on this host. NCCL needs one GPU per worker; falling back to Gloo, which "
    "copies tensors through host memory. Start one worker for each GPU."
)
_shared = False  # the same on every rank of the world; written by `settle` alone, whenever a world is joined


def settle_shared_gpus(rank: int, gather: Callable[[bytes, str], list[bytes]]) -> None:
    """Collective. Find out whether workers of this world share GPUs; rank 0 warns if so.

    ``gather``: returns every rank's text.
    """
    global _shared
    problem = why_shared([json.loads(text) for text in gather(json.dumps(visible()).encode(), "gpus")])
    _shared = bool(problem)
    if problem and rank == 0:
        warnings.warn(problem, stacklevel=2)


def gpus_are_shared() -> bool:
    """Return whether workers of this world share GPUs."""
    return _shared


def visible() -> list[str]:
    """Return the GPUs that this process sees, by names that are theirs alone; before torch 2.4 by their numbers.

    Where NCCL_HOSTID says that this process is on a host of its own, NCCL takes GPUs that others have too, and each
    host's GPUs have other names here as well.
    """
    if not torch.cuda.is_available():
        return []
    host = os.environ.get("NCCL_HOSTID", "")
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    names = [getattr(one, "uuid", f"{chosen}/{number}") for number, one in enumerate(properties)]
    return [f"{host}{'/' * bool(host)}{name}" for name in names]


def why_shared(seen: Sequence[Sequence[str]]) -> str:
    """Return a warning if more workers see the same GPUs than there are of these; else "". ``seen``: by rank."""
    for gpus, workers in Counter(frozenset(gpus) for gpus in seen).items():
        if workers > len(gpus) > 0:
            return SHARED.format(workers=workers, gpus="one GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs")
    return ""


# Streams and events.

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


# Copies on the host, which no host waits for before it has to.


class HostCopies:
    """Copy of tensors of one device on the host: one transfer, queued at once, and waited for at most once."""

    def __init__(self, tensors: Sequence[torch.Tensor], streams: Streams) -> None:
        """Queue the copy of ``tensors``, contiguous or with contiguous rows, in the device's current stream."""
        self._tensors, self._streams = tensors, streams
        rows = [row for tensor in tensors for row in ([tensor] if tensor.is_contiguous() else tensor.unbind(0))]
        together = torch.cat([row.view(-1).view(torch.uint8) for row in rows])
        self._bytes = streams.pinned(together.numel(), torch.uint8).copy_(together, non_blocking=True)
        self._event = streams.record(streams.current(together.device))

    def arrive(self, timeout: float) -> bool:
        """Wait until the host has them, for at most ``timeout`` seconds; return whether it has."""
        return self._streams.wait_on_host(self._event, timeout)

    def tensors(self) -> list[torch.Tensor]:
        """Return them on the host, each in its shape, once they have arrived."""
        ends = itertools.accumulate(tensor.nbytes for tensor in self._tensors)
        return [
            self._bytes[end - tensor.nbytes : end].clone().view(tensor.dtype).view(tensor.shape)
            for tensor, end in zip(self._tensors, ends, strict=True)
        ]
