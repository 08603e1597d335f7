# SPDX-License-Identifier: Apache-2.0
"""Notice when this process did not run: a thread that wakes up twice a second has not woken up for longer.

A stopped process waits no longer than others, by its own clock, but in vain: they have given up in the meantime.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

EVERY = 0.5  # seconds between two beats, at most
SHORTEST = 2.0  # seconds without a beat that count: a busy machine lets a thread wait for some of them
REMEMBERED = 32  # pauses
BUSY = 0.25  # seconds of CPU time in a second of a pause: with less of it nothing can have run


@dataclass(frozen=True)
class Pause:
    """Time between two beats."""

    end: float  # seconds of the monotonic clock
    seconds: float
    cpu: float  # seconds of CPU time of all threads, in it


class Pauses:
    """Times at which this process did not run. :meth:`beat` is called by one thread, anything else by any.

    Before the first beat nothing is known: where no thread beats, there was no pause.
    """

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None  # monotonic clock and CPU time of the last beat
        self._pauses: deque[Pause] = deque(maxlen=REMEMBERED)
        self._lock = threading.Lock()  # a pause is in the list or since the last beat, never in neither

    def beat(self) -> None:
        """Record that this process runs."""
        with self._lock:
            now = _now()  # read once: between two readings a process can be stopped
            pause = self._since_last(*now)
            self._last = now
            if pause.seconds >= SHORTEST:
                self._pauses.append(pause)

    def describe(self, moment: float, least: float = SHORTEST) -> str:
        """Return for how long this process did not run, to be read after "it"; empty if less than ``least`` seconds.

        ``moment``: of the monotonic clock; only pauses that ended later count. A pause that
        has just ended, before its beat, does.
        """
        with self._lock:
            pauses = [*self._pauses, self._since_last(*_now())]
        pauses = [pause for pause in pauses if pause.end > moment and pause.seconds >= SHORTEST]
        seconds, cpu = sum(pause.seconds for pause in pauses), sum(pause.cpu for pause in pauses)
        if seconds < max(least, SHORTEST):
            return ""
        stopped = "stopped (SIGSTOP, a debugger, a frozen container or machine)"
        why = stopped if cpu < BUSY * seconds else "stopped, or in code that lets no other thread run"
        return f"did not run for {seconds:.1f} s: it was {why}"

    def _since_last(self, now: float, cpu: float) -> Pause:
        """Return the time from the last beat to this moment; none before the first."""
        before, cpu_before = self._last or (now, cpu)
        return Pause(now, now - before, cpu - cpu_before)


def _now() -> tuple[float, float]:
    """Return the seconds of the monotonic clock, and of CPU time of all threads of this process."""
    return time.monotonic(), time.process_time()
