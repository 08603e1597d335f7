# SPDX-License-Identifier: Apache-2.0
"""Asynchronous calls, matched by their names: ranks may make them in different orders.

agmerge matches calls by their order. So a call waits here until its result is asked for. Then all calls of this rank
that wait begin, ordered by their names. A call without a name is named by its number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import agmerge

DUPLICATE = (
    "{label} is already waiting: two tensors have the same name. Call synchronize() for the first one, or use "
    "different names."
)


class Waiting:
    """Asynchronous call of this rank, and the handle of its script. ``start``: begins it, and returns agmerge's."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start
        self._handle: Any = None  # of agmerge; None: it has not begun
        self._error: Exception | None = None  # with which it has not

    def begin(self) -> None:
        """Collective. Begin the call. An error is kept for :meth:`handle`."""
        try:
            self._handle = self._start()
        except Exception as error:
            self._error = error

    def handle(self) -> Any:
        """Return agmerge's handle of a call that has begun. Raises the error with which it has not."""
        if self._error is not None:
            raise self._error
        return self._handle


_waiting: dict[str, Waiting] = {}  # by kind and name
_number = 0  # of the last call without a name


def add(kind: str, name: str | None, start: Callable[[], Any]) -> Waiting:
    """Add a call to those that wait, and return it. Raises ``ValueError`` if one of this kind and ``name`` waits."""
    global _number
    _number += name is None
    label = f"{kind}.noname.{_number:012d}" if name is None else f"{kind}.{name}"
    if label in _waiting:
        raise ValueError(DUPLICATE.format(label=label))
    _waiting[label] = Waiting(start)
    return _waiting[label]


def clear() -> None:
    """Forget the calls that wait: the group of workers that they were for is gone."""
    global _number
    _waiting.clear()
    _number = 0


def _begun(given: Any, call: str) -> Any:
    """Collective. Begin all calls that wait, if ``given`` is one of them; return the handle of ``given``."""
    if not hasattr(given, "handle"):
        raise ValueError(f"{call}: expected the result of an ..._async call, got {given!r}")
    if given in _waiting.values():
        calls = [waiting for _, waiting in sorted(_waiting.items())]
        _waiting.clear()
        for waiting in calls:
            waiting.begin()
    return given.handle()


def poll(handle: Any) -> bool:
    """Collective. Return whether the result of an asynchronous call is there. Begins calls that wait."""
    return agmerge.poll(_begun(handle, "poll"))


def synchronize(handle: Any) -> Any:
    """Collective. Wait for an asynchronous call, and return its result. Begins calls that wait."""
    return agmerge.synchronize(_begun(handle, "synchronize"))
