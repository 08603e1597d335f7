# SPDX-License-Identifier: Apache-2.0
"""One rank's accelerator: its streams, what the host has waited for, and the books.

There is one ``pretend:0`` in a process; ranks that are threads have a :class:`Device` each, which knows its own tensors
(:mod:`pretend.tensors`). What is made from nothing belongs to the device that its thread used last.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from pretend.books import Books, place
from pretend.clocks import Clock, Memory, Stream, covers, merge
from pretend.operations import Access
from pretend.pinned import PinnedMemory

ROUNDED = 512  # bytes: torch's allocator asks for multiples of it

_thread = threading.local()  # .device: the one that this thread used last; .streams: see _streams


class Kernels:
    """Kernels that take time, of one device. Here: none does."""

    def have_ended(self, clock: Clock) -> bool:
        """Whether all of them have ended that are queued before ``clock``."""
        return True

    def wait(self, clock: Clock, seconds: float, what: str) -> bool:
        """Block the host until all before ``clock`` has ended, or for so many seconds; return whether it has."""
        return True

    def allocate(self) -> None:
        """Ask the driver for memory, which may wait for all kernels."""


class Device:
    """Be one rank's accelerator: what is asked of it is written into ``books``.

    ``is_watched``: launches and races, too, which takes more time than to compute; else waits alone.
    ``kernels``: those that take time; None: each has ended as soon as somebody looks.
    ``leave_out``: do not wait where this line of the library asks for it, to see that it is missed; empty: wait.
    """

    def __init__(self, *, is_watched: bool = True, kernels: Kernels | None = None) -> None:
        self.is_watched = is_watched
        self._kernels = kernels or Kernels()
        self._cached: Counter[tuple[Stream, int]] = Counter()  # free blocks of memory, by stream and bytes
        self.books = Books()
        self.pinned = PinnedMemory(self.books.raced)
        self.default = Stream("default")
        self._streams = [self.default]
        self._host: Clock = {}  # what the host has waited for
        self.is_fused = False  # what is asked for is part of a kernel that is written down
        self.is_capturing = False  # see `capturing`
        self.leave_out = ""
        self.waiting_lines: set[str] = set()  # of the library: where streams, or the host, wait for events

    def use(self) -> None:
        """Let this thread make its tensors here."""
        _thread.device = self

    # -- streams ------------------------------------------------------------------------------------------------

    @property
    def stream(self) -> Stream:
        """The stream that this thread queues into."""
        stream: Stream = _streams().get(self, self.default)
        return stream

    def new_stream(self, name: str) -> Stream:
        """Return another stream."""
        stream = Stream(name)
        stream.wait(self._host)
        self._streams.append(stream)
        return stream

    @contextmanager
    def within(self, stream: Stream) -> Iterator[None]:
        """Let this thread queue into ``stream``."""
        before = self.stream
        self.enter(stream)
        try:
            yield
        finally:
            self.enter(before)

    def enter(self, stream: Stream) -> None:
        """Let this thread queue into ``stream`` from now on."""
        _streams()[self] = stream

    def queue(self, operation: str, count: int, accesses: Sequence[Access], memory: Sequence[Memory | None]) -> None:
        """Queue ``count`` kernels in the current stream. ``memory``: of each access; None: the host's."""
        if not self.is_fused:
            size = sum(one.elements * one.tensor.element_size() * (one.reads + one.writes) for one in accesses)
            self.books.launched(operation, count, size)
        what = f"{operation} {place().line}"
        stream, time = self.stream, self.stream.tick()
        for access, allocation in zip(accesses, memory, strict=True):
            if allocation is not None and access.tensor.numel():
                allocation.use(access.tensor, access.writes, stream, time, what)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Say that what is queued inside is captured in a graph. (It is done all the same.)"""
        self.is_capturing = True
        try:
            yield
        finally:
            self.is_capturing = False

    @contextmanager
    def fused(self) -> Iterator[None]:
        """Write down no launches inside: they are one, which the caller writes down."""
        before, self.is_fused = self.is_fused, True
        try:
            yield
        finally:
            self.is_fused = before

    def wait(self, stream: Stream, clock: Clock) -> None:
        """Let what is queued in ``stream`` from now on wait for ``clock``, and the host go on."""
        if not self._is_left_out(place().line):
            stream.wait(clock)

    def wait_on_host(self, what: str, clock: Clock | None = None, seconds: float = math.inf) -> bool:
        """Block the host until ``clock``; None: for the current stream, and that it does in any case.

        Returns whether it has come within so many seconds.
        """
        if clock is not None and clock and self._is_left_out(place().line):
            return True
        if clock is None or not self.knows(clock):
            self.books.waited(what)
        clock = self.stream.clock if clock is None else clock
        if not self._kernels.wait(clock, seconds, what):
            return False
        self.know(clock)
        return True

    def looks(self, clock: Clock) -> bool:
        """Whether ``clock`` has come: then the host knows."""
        if not self._kernels.have_ended(clock):
            return False
        self.know(clock)
        return True

    def knows(self, clock: Clock) -> bool:
        """Whether the host knows that ``clock`` has come."""
        return covers(self._host, clock)

    def know(self, clock: Clock) -> None:
        """Let the host know that ``clock`` has come; what it queues from now on is behind it."""
        merge(self._host, clock)
        for stream in self._streams:
            stream.wait(clock)
        self.pinned.waited(self._host)

    def allocate(self, tensor: Tensor) -> Memory:
        """Return the memory of the host's ``tensor`` for the current stream, as torch's caching allocator finds it."""
        size = -(-tensor.untyped_storage().nbytes() // ROUNDED) * ROUNDED
        block = self.stream, size
        if self._cached[block] > 0:
            self._cached[block] -= 1
        elif size:
            self._kernels.allocate()
        return Memory(self.stream, self.books.raced, lambda: self._cached.update([block]))

    def _is_left_out(self, line: str) -> bool:
        if line:
            self.waiting_lines.add(line)
        return bool(line) and line == self.leave_out

    def wait_for_all(self, what: str) -> None:
        """Let the host wait until there is nothing to do."""
        clock: Clock = {}
        for stream in self._streams:
            merge(clock, stream.clock)
        self.wait_on_host(what, clock)


def _streams() -> dict[Device, Stream]:
    """By device: the stream that this thread queues into, where that is not the default one."""
    if not hasattr(_thread, "streams"):
        _thread.streams = {}
    streams: dict[Device, Stream] = _thread.streams
    return streams


def has_current() -> bool:
    """Whether this thread has a device: others work on the host."""
    return hasattr(_thread, "device")


def current() -> Device:
    """The device of this thread."""
    device: Device = _thread.device
    return device
