"""Plan in pieces: whoever has little time at a time goes on with it later, and comes to the same plan.

A function whose name ends in ``_in_pieces`` is a generator that yields None wherever it can be left, after some ten to
a thousand microseconds, and returns what the function without these words does.
"""

from __future__ import annotations

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
