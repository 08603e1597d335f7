# SPDX-License-Identifier: Apache-2.0
"""Write down what a pretended device is asked to do: launches, bytes and host waits, with the library's line."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from pretend.clocks import Race

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = tuple(str(ROOT / name) + "/" for name in ("agmerge", "sparsifiers", "merging"))
RANKS = str(ROOT / "agmerge" / "testing.py")  # calls what a rank does, so it is on every stack
OPTIMIZERS = "/torch/optim/"  # the inner optimizer's work is the script's, although the library calls it
HOOK, SYNCHRONIZE, ELSEWHERE, SCRIPT = "hook", "synchronize", "elsewhere", "script"  # phases
COLLECTIVE = "nccl"  # the operation that a collective is written down as

_kinds: dict[CodeType, str] = {}  # of functions that were seen on a stack: "", "library", "optimizer" or a phase


class Place(NamedTuple):
    """Where in the library something was asked for."""

    phase: str  # HOOK, SYNCHRONIZE, ELSEWHERE in the library, or SCRIPT
    line: str  # of the library, "exchanges/sparse.py:88 wait"; empty in the script


class Launch(NamedTuple):
    """Kernels of one operation."""

    operation: str
    kernels: int
    bytes: int  # read and written
    place: Place


class Wait(NamedTuple):
    """A moment in which the host waits for the device."""

    what: str  # the operation that waits
    place: Place
    stack: tuple[str, ...]  # lines of the library, the innermost first


class Books:
    """Hold the launches, waits and races of one device since it was made, or since :meth:`clear`."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget what was written down."""
        self.launches: list[Launch] = []
        self.waits: list[Wait] = []
        self.races: list[Race] = []

    def taken(self) -> Books:
        """Return what was written down, and begin anew."""
        taken = copy.copy(self)
        self.clear()
        return taken

    def launched(self, operation: str, count: int, size: int) -> Place:
        """Write down ``count`` kernels that move ``size`` bytes together; return what asked for them."""
        where = place()
        self.launches.append(Launch(operation, count, size, where))
        return where

    def waited(self, what: str) -> None:
        """Write down that the host waits now."""
        self.waits.append(Wait(what, place(), tuple(_lines(sys._getframe(1)))))

    def raced(self, race: Race) -> None:
        """Write down a race."""
        self.races.append(race)

    def count(self, *phases: str) -> int:
        """Kernels in these phases; without any, in all of the library."""
        return sum(launch.kernels for launch in self.launches if _counts(launch.place, phases))

    def bytes(self, *phases: str) -> int:
        """Bytes that these kernels move."""
        return sum(launch.bytes for launch in self.launches if _counts(launch.place, phases))

    def waits_in(self, *phases: str) -> list[Wait]:
        """Host waits in these phases; without any, in all of the library."""
        return [wait for wait in self.waits if _counts(wait.place, phases)]


def place() -> Place:
    """The library's innermost line on this thread's stack, and the phase of a step that it belongs to."""
    frame: FrameType | None = sys._getframe(1)
    line = ""
    while frame is not None:
        kind = _kind(frame.f_code)
        if kind == "optimizer" and not line:
            return Place(SCRIPT, "")
        if kind and not line:
            line = _line(frame)
        if kind in (HOOK, SYNCHRONIZE):
            return Place(kind, line)
        frame = frame.f_back
    return Place(ELSEWHERE if line else SCRIPT, line)


def _counts(place: Place, phases: tuple[str, ...]) -> bool:
    return place.phase in phases if phases else place.phase != SCRIPT


def _kind(code: CodeType) -> str:
    kind = _kinds.get(code)
    if kind is None:
        kind = ""
        if code.co_filename.startswith(LIBRARY) and code.co_filename != RANKS:
            kind = {"on_gradient": HOOK, "synchronize": SYNCHRONIZE}.get(code.co_name, "library")
            kind = "library" if "/engine/" not in code.co_filename else kind
        elif OPTIMIZERS in code.co_filename:
            kind = "optimizer"
        _kinds[code] = kind
    return kind


def _lines(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        if _kind(frame.f_code) not in ("", "optimizer"):
            yield _line(frame)
        frame = frame.f_back


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename[len(str(ROOT)) + 1 :]}:{frame.f_lineno} {frame.f_code.co_name}"
