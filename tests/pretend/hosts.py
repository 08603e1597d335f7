# SPDX-License-Identifier: Apache-2.0
"""Hosts of ranks that are threads, in virtual time: one runs at a time, and time passes where all of them wait.

Which one goes on is drawn wherever one of them waits, so that each seed is another order of events, the same in every
run. Nothing depends on a clock: a deadlock is seen at once, when no host can go on and none has a deadline.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Stuck(AssertionError):
    """What a watchdog says when its time has passed: no rank can go on."""


class Wait(NamedTuple):
    """A host that waits."""

    what: str  # in words
    until: Callable[[], bool]
    ends: float  # virtual seconds: its deadline


class Hosts:
    """Hosts of ``size`` ranks, of which one runs at a time. ``seed``: of who goes on.

    A host may have several threads, but one of them at a time calls what is here.
    """

    def __init__(self, size: int, seed: int) -> None:
        self._turns, self._random = threading.Condition(), random.Random(seed)
        self._to_come, self._running, self._now = size, -1, 0.0  # hosts that have not begun; the rank that runs
        self._waits: dict[int, Wait] = {}  # by rank
        self._stuck = ""  # who waits for what, once nobody can go on

    @contextmanager
    def run(self, rank: int) -> Iterator[None]:
        """Run what is inside as the host of a rank: others run when it waits, and behind it."""
        with self._turns:  # which wait() takes again: nobody is chosen before the last one is among those that wait
            self._to_come -= 1
            self.wait(rank, lambda: self._to_come == 0, "the others")
        try:
            yield
        finally:
            with self._turns:
                self._choose()

    def pause(self, rank: int) -> None:
        """Yield to other hosts, perhaps."""
        self.wait(rank, lambda: True, "its turn")

    def wait(self, rank: int, until: Callable[[], bool], what: str, seconds: float = math.inf) -> bool:
        """Yield to other hosts until ``until()``; return whether that has come within so many virtual seconds.

        ``what`` is waited for, in words. With 0 seconds it is waited for as long as another host can go on. Without
        a deadline: raises :class:`Stuck` on all ranks where no host can go on.
        """
        with self._turns:
            self._waits[rank] = Wait(what, until, self._now + seconds)
            self._choose()
            self._turns.wait_for(lambda: self._running == rank)
            del self._waits[rank]
            if until():
                return True
            if self._stuck:
                raise Stuck(self._stuck)
            return False

    def _choose(self) -> None:
        """Let one go on that can; where none can, the first one whose deadline comes."""
        able = [] if self._to_come else [rank for rank, wait in sorted(self._waits.items()) if wait.until()]
        if not able and self._waits and not self._to_come:
            self._now = min(wait.ends for wait in self._waits.values())
            able = [rank for rank, wait in sorted(self._waits.items()) if wait.ends == self._now]
            if self._now == math.inf:
                self._stuck = self._stuck or "; ".join(
                    f"rank {rank} waits for {wait.what}" for rank, wait in sorted(self._waits.items())
                )
        self._running = self._random.choice(able) if able else -1
        self._turns.notify_all()
