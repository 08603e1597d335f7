"""Plan in pieces: whoever has little time at a time goes on with it later, and comes to the same plan.

A function whose name ends in ``_in_pieces`` is a generator that yields None wherever it can be left, after some ten to
a thousand microseconds, and returns what the function without these words does.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Pieces = Generator[None, None, T]


def at_once(pieces: Pieces[T]) -> T:
    """Return what the pieces come to, all of them done now."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: T = end.value
            return result


def go_on(pieces: Pieces[T], seconds: float) -> T | None:
    """Go on with the pieces for so many seconds; return what they come to, or None if that is not known yet.

    What they come to does not depend on how often this is called.
    """
    until = time.perf_counter() + seconds
    try:
        while True:
            next(pieces)
            if time.perf_counter() > until:
                return None
    except StopIteration as end:
        result: T = end.value
        return result
