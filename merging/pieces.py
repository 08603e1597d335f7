"""Planning in pieces: it can be interrupted and resumed with little time at a time, and gives the same plan.

A function with a name that ends in ``_in_pieces`` is a generator. It yields None at each possible interruption, after
some ten to a thousand microseconds, and returns the result of the function without these words.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Pieces = Generator[None, None, T]


def at_once(pieces: Pieces[T]) -> T:
    """Return the result of the pieces, all of them done now."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: T = end.value
            return result


def go_on(pieces: Pieces[T], seconds: float) -> T | None:
    """Resume the pieces for so many seconds; return their result, or None if it is not known yet.

    The result does not depend on how often this is called.
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
