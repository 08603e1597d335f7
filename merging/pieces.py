# SPDX-License-Identifier: Apache-2.0
"""Planning in pieces: it can be interrupted and resumed with little time at a time, and gives the same plan.

What takes long is a generator: it yields None at each possible interruption, after some ten to a thousand
microseconds, and returns its result. `in_pieces` makes it a function as any other one, which runs to its end, and
`pieces_of` a generator again.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Generator
from types import MethodType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Pieces = Generator[None, None, T]


def in_pieces(pieces: Callable[P, Pieces[T]]) -> Callable[P, T]:
    """Make an ordinary function, or method, of a generator that yields None at possible interruptions: a decorator."""

    @functools.wraps(pieces)
    def to_the_end(*args: P.args, **kwargs: P.kwargs) -> T:
        return run_to_end(pieces(*args, **kwargs))

    return to_the_end


def pieces_of(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Pieces[T]:
    """Return the result of a call, in pieces: one, unless the function is written with `in_pieces`."""
    written = getattr(function, "__wrapped__", None)
    if not inspect.isgeneratorfunction(written):
        yield
        return function(*args, **kwargs)
    owner = (function.__self__,) if isinstance(function, MethodType) else ()
    result: T = yield from written(*owner, *args, **kwargs)
    return result


def run_to_end(pieces: Pieces[T]) -> T:
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
