# SPDX-License-Identifier: Apache-2.0
"""Time of collectives that differs by rank: each sees at another moment that one of them has ended."""

from __future__ import annotations

import random
from typing import NamedTuple

from agmerge.backends import Handle

LONGEST = 6  # looks, at most, before a rank sees that a collective has ended


class Call(NamedTuple):
    """A collective that one rank has started."""

    communicator: str  # the label that it was made with
    name: str


class Schedule:
    """What one rank starts, and when it sees that as ended: after so many looks at anything, by ``seed``.

    ``calls``: in the order of their starts.
    """

    def __init__(self, seed: int) -> None:
        self._random, self.now = random.Random(seed), 0
        self.calls: list[Call] = []

    def follow(self, handle: Handle, communicator: str, name: str) -> Handle:
        """Note a collective that has just been started, and return what is seen of it."""
        self.calls.append(Call(communicator, name))
        return SeenLater(handle, self, self.now + self._random.randint(0, LONGEST))


class SeenLater(Handle):
    """A collective that is seen as ended from the time ``ends`` of ``schedule`` on, or once it was waited for."""

    def __init__(self, inner: Handle, schedule: Schedule, ends: int) -> None:
        super().__init__(inner._name, inner._ranks)
        self._inner, self._schedule, self._ends = inner, schedule, ends

    def done(self) -> bool:
        self._schedule.now += 1
        return self._schedule.now > self._ends and self._inner.done()

    def _wait(self, timeout: float) -> None:
        self._inner._wait(timeout)
        self._ends = 0
