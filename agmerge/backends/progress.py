# SPDX-License-Identifier: Apache-2.0
"""Make the calls of a library on a thread of its own, one after the other, and poll those that are under way."""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

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
