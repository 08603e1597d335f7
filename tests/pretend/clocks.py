# SPDX-License-Identifier: Apache-2.0
"""Find accesses that no event orders: what one stream does to memory while another one uses it.

Each stream counts what is queued in it, and knows how far every other stream has been waited for: its clock. An access
has happened before another one if the clock of that one's stream has come to it. Two that touch a byte in common, one
of them writing, must be so ordered: the rule of torch's sanitizer for CUDA, by bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

Clock = dict["Stream", int]  # how much of each stream has ended for sure


class Stream:
    """Be a queue of a device. ``name``: for reports."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Clock = {self: 0}

    def tick(self) -> int:
        """Queue something, and return its number."""
        self.clock[self] += 1
        return self.clock[self]

    def wait(self, clock: Clock) -> None:
        """Let what is queued from now on wait for ``clock``."""
        merge(self.clock, clock)

    def __repr__(self) -> str:
        return self.name


def merge(clock: Clock, other: Clock) -> None:
    """Let ``clock`` know what ``other`` knows."""
    for stream, time in other.items():
        clock[stream] = max(time, clock.get(stream, 0))


def covers(clock: Clock, other: Clock) -> bool:
    """Whether ``clock`` knows all that ``other`` knows."""
    return all(clock.get(stream, 0) >= time for stream, time in other.items())


class Race(NamedTuple):
    """Two accesses that no event orders."""

    first: str  # what was queued first: stream, operation and line
    second: str


class Use(NamedTuple):
    """One access to memory."""

    start: int  # byte
    stop: int  # the byte after the last one
    writes: bool
    stream: Stream
    time: int  # its number in the stream
    what: str  # operation and line

    def is_before(self, stream: Stream) -> bool:
        """Whether what ``stream`` does next happens after this."""
        return stream.clock.get(self.stream, 0) >= self.time

    def __str__(self) -> str:
        return f"{self.stream} {'writes' if self.writes else 'reads'} bytes {self.start} to {self.stop}: {self.what}"


class Memory:
    """Hold what was done to the bytes of one allocation; views of it share this.

    ``stream``: which it was allocated for, and whose next allocation may get it as soon as it is freed. ``report`` is
    told of races, ``freed`` of the end.
    """

    def __init__(self, stream: Stream, report: Callable[[Race], None], freed: Callable[[], None]) -> None:
        self._stream, self._report, self._freed = stream, report, freed
        self._uses: list[Use] = []

    def use(self, tensor: Tensor, writes: bool, stream: Stream, time: int, what: str) -> None:
        """Note that ``stream`` touches the bytes of ``tensor``, the host's, and report what that races with."""
        start, stop = extent(tensor)
        new, kept = Use(start, stop, writes, stream, time, what), []
        for old in self._uses:
            is_before = old.is_before(stream)
            if not is_before and (writes or old.writes) and old.start < stop and start < old.stop:
                self._report(Race(str(old), str(new)))
            # What races with a use before this one races with this one, too, if it does the same or more.
            does_more = writes or (not old.writes and old.stream is stream)
            if not (is_before and does_more and start <= old.start and old.stop <= stop):
                kept.append(old)
        self._uses = [*kept, new]

    def __del__(self) -> None:
        for use in self._uses:
            if not use.is_before(self._stream):
                self._report(Race(str(use), f"{self._stream} frees it"))
        self._freed()


def extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one after its last."""
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.element_size(), (last + 1) * tensor.element_size()
