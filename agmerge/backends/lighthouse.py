# SPDX-License-Identifier: Apache-2.0
"""Lighthouse of an elastic job: the store that it serves, and connections to it of which every call ends.

A process that is stopped, or has lost its machine, accepts connections and says nothing. torch's store waits for it
without a time-out, in its constructor already.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from agmerge.backends import addresses, open_files
from agmerge.errors import AGMergeError, shortened

BEAT = 0.2  # seconds between two signs of life, and between two looks for a lighthouse
ATTEMPT = 1.0  # seconds for which a lighthouse that is gone is looked for at a time
ANSWER = 10.0  # seconds for the answer to a question
READY = "ready"  # key in the store, since:
SETTLES = 3.0  # seconds after its start in which a lighthouse lets no newcomers in: a job may be looking for it
CONNECTED = ""  # name of the call that only waits for the connection
SILENT = (
    "a process accepts connections at this address but does not answer as a lighthouse: another program, or a stopped "
    "process"
)


class BoundedStore:
    """Store of torch's of which every call ends, by ``RuntimeError`` where there is no answer; then all later ones do.

    ``connect``: returns the store. ``seconds``: for that; ``answer``: for a call. Both run on a thread, which stays
    behind where it gets no answer: nothing can end torch's call.
    """

    def __init__(self, connect: Callable[[], Any], seconds: float, answer: float = ANSWER) -> None:
        self._answer, self._is_lost = answer, False
        self._calls: queue.Queue[_Call | None] = queue.Queue()
        given = connect, self._calls
        threading.Thread(target=_make_calls, args=given, name="agmerge asks the lighthouse", daemon=True).start()
        self._result(CONNECTED, seconds)

    def _result(self, name: str, seconds: float, *given: Any) -> Any:
        if self._is_lost:
            raise RuntimeError(SILENT)
        call = _Call(name, given)
        self._calls.put(call)
        if not call.ended.wait(seconds):
            self.close()
            raise RuntimeError(SILENT)
        if call.error is not None:
            raise call.error
        return call.result

    def close(self) -> None:
        """Use it no more."""
        self._is_lost = True
        self._calls.put(None)

    def __del__(self) -> None:
        self.close()

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._result("set", self._answer, key, value)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return it."""
        return int(self._result("add", self._answer, key, amount))

    def compare_set(self, key: str, expected: str | bytes, desired: str) -> bytes:
        """Write ``desired`` if the value is ``expected``, or there is none; return the value of then."""
        return bytes(self._result("compare_set", self._answer, key, expected, desired))

    def wait(self, keys: list[str], longest: timedelta) -> None:
        """Wait until all ``keys`` are there."""
        self._result("wait", longest.total_seconds() + self._answer, keys, longest)


def _make_calls(connect: Callable[[], Any], calls: queue.Queue[_Call | None]) -> None:
    """Connect, and make one call after another, until the last one."""
    store, error = None, None
    try:
        store = connect()
    except Exception as caught:
        error = caught
    while (call := calls.get()) is not None:
        call.run(store, error)


class _Call:
    """Call of a store's method on another thread."""

    def __init__(self, name: str, given: tuple[Any, ...]) -> None:
        self._name, self._given = name, given
        self.ended = threading.Event()
        self.result: Any = None
        self.error: Exception | None = None

    def run(self, store: Any, error: Exception | None) -> None:
        """Make the call; ``error``: there is no store."""
        try:
            if error is not None:
                raise error
            if self._name != CONNECTED:
                self.result = getattr(store, self._name)(*self._given)
        except Exception as caught:
            self.error = caught
        self.ended.set()


class Lighthouse:
    """Place of a lighthouse, ``host:port`` as the user names it. ``dist``: the module ``torch.distributed``."""

    def __init__(self, dist: Any, place: str, patience: float) -> None:
        host, _, port = place.rpartition(":")
        self._dist, self._patience = dist, patience
        self.host, self.port = host, int(port)

    def connected(self, seconds: float) -> BoundedStore:
        """Return a connection to the job's store. Raises ``RuntimeError`` if it cannot be had within ``seconds``."""
        end = time.monotonic() + seconds
        while not addresses.answers(self.host, self.port, ATTEMPT):  # torch's attempts write stacks of C++ into the log
            if time.monotonic() > end:
                raise RuntimeError("")
            time.sleep(BEAT)
        longest = timedelta(seconds=seconds)

        def connect() -> Any:
            return self._dist.TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=longest)

        return BoundedStore(connect, max(end - time.monotonic(), ATTEMPT), min(ANSWER, self._patience))

    def missing(self, why: str = "", within: str = "") -> AGMergeError:
        """Return the error that there is no lighthouse. ``why``: if that is known. ``within``: instead of patience."""
        because = f" ({shortened(why)})" if why else ""
        return AGMergeError(
            f"AGM014: No lighthouse answers at {self.host}, port {self.port}, "
            f"{within or f'within {self._patience:g} s'}{because}. Start one with `python -m agmerge lighthouse "
            f"--port {self.port}`, or set AGMERGE_LIGHTHOUSE to its address."
        )


def serve(dist: Any, port: int) -> Any:
    """Return a store for the workers of a job, which this process serves as long as it is referred to.

    Newcomers come in after ``SETTLES`` seconds: first come the workers of a job whose lighthouse was started again.
    """
    store = dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    open_files.close_in_children(store.port)

    def let_in() -> None:
        time.sleep(SETTLES)
        store.set(READY, "")

    threading.Thread(target=let_in, name="agmerge lets in", daemon=True).start()
    return store
