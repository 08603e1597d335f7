# SPDX-License-Identifier: Apache-2.0
"""Asynchronous calls, matched by their names: ranks may make them in different orders.

agmerge matches calls by their order. So a call waits here until its result is asked for. Then all calls of this rank
that wait begin, ordered by their names. A call without a name is named by its number.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import agmerge

DUPLICATE = (
    "{kind}: a call named {name!r} is already waiting: two tensors have the same name. Call synchronize() for the "
    "first one, or use different names."
)
NO_HANDLE = "{call}: expected the result of an ..._async call, got {handle!r}"


class Waiting:
    """Asynchronous call of this rank, and the handle of its script. ``start``: begins it, and returns agmerge's handle.

    ``label``: the kind of call and its name.
    """

    def __init__(self, label: str, start: Callable[[], Any]) -> None:
        self._label, self._start = label, start
        self._handle: Any = None  # of agmerge; None: it has not begun
        self._error: Exception | None = None  # with which it has not

    def __repr__(self) -> str:
        return f"<{self._label}>"

    def begin(self) -> None:
        """Collective. Begin the call. An error is kept for :meth:`handle`."""
        try:
            self._handle = self._start()
        except Exception as error:
            self._error = error

    def handle(self) -> Any:
        """Return the handle of a call that has begun. Raises the error with which it has not."""
        if self._error is not None:
            raise self._error
        return self._handle


class Calls:
    """Asynchronous calls of a process that wait for their turn, by label."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: dict[str, Waiting] = {}
        self._number = 0  # of calls without a name

    def add(self, kind: str, name: str | None, start: Callable[[], Any]) -> Waiting:
        """Let a call wait, and return it. Raises ``ValueError`` where one of this kind and ``name`` waits already."""
        with self._lock:
            if name is None:
                self._number += 1
                label = f"{kind}.noname.{self._number:012d}"
            else:
                label = f"{kind}.{name}"
            if label in self._waiting:
                raise ValueError(DUPLICATE.format(kind=kind, name=name))
            self._waiting[label] = waiting = Waiting(label, start)
            return waiting

    def begun(self, given: Any, call: str) -> Any:
        """Collective. Begin all calls that wait, if ``given`` is one of them. Return the handle of ``given``.

        ``call``: of the script, for the error where ``given`` is no handle.
        """
        if not isinstance(given, Waiting):
            raise ValueError(NO_HANDLE.format(call=call, handle=given))
        with self._lock:
            if given in self._waiting.values():
                for _, waiting in sorted(self._waiting.items()):
                    waiting.begin()
                self._waiting.clear()
            return given.handle()

    def clear(self) -> None:
        """Forget calls that wait: the group of workers that they were for is gone."""
        with self._lock:
            self._waiting.clear()
            self._number = 0


calls = Calls()  # of this process


def poll(handle: Any) -> bool:
    """Collective. Return whether the result of an asynchronous call is there. Begins calls that wait."""
    return agmerge.poll(calls.begun(handle, "poll"))


def synchronize(handle: Any) -> Any:
    """Collective. Wait for an asynchronous call, and return its result. Begins calls that wait."""
    return agmerge.synchronize(calls.begun(handle, "synchronize"))
