# SPDX-License-Identifier: Apache-2.0
"""Limits of probes and planning: how much longer a step takes; of probes also their time and bytes in all."""

from __future__ import annotations

import math

SECONDS = 1.0  # for all probes together,
STEPS = 3.0  # or so many steps' worth of time, whichever is more
SHARE = 0.05  # of a step: limit of the time for probes, or for a part of planning, after it
LEAST = 1e-3  # seconds that are allowed after any step: in less nothing can be timed
GRADIENTS = 8.0  # times the bytes of all gradients, for all probes together: docs/dev/planning.md says why
FLOOR = 1 << 16  # bytes that any model may spend: below, its messages are headers and little else


def share_of(step: float) -> float:
    """Return the seconds by which a step that takes ``step`` seconds may be longer."""
    return max(LEAST, SHARE * step)


class Budget:
    """Account of probes.

    Figures are the maximum over ranks, so that every rank counts, and stops, at the same point.
    """

    def __init__(self, step: float, gradient: int, *, at_once: bool = False) -> None:
        """Set the limits where a step takes ``step`` seconds and all gradients ``gradient`` bytes.

        ``at_once``: all probes follow one step, however long they take.
        """
        self.share = math.inf if at_once else share_of(step)  # seconds, after one step
        self._seconds = max(SECONDS, STEPS * step)
        self._bytes = max(FLOOR, GRADIENTS * gradient)
        self.seconds, self.bytes = 0.0, 0.0  # spent so far
        self._here = 0.0  # seconds spent after the step that has just ended

    @property
    def is_spread(self) -> bool:
        """Return whether probes are spread over steps."""
        return self.share < math.inf

    def spend(self, seconds: float, sent: float) -> None:
        """Count a probe that took so many seconds and handed so many bytes to collectives."""
        self.seconds, self.bytes, self._here = self.seconds + seconds, self.bytes + sent, self._here + seconds

    def next_step(self) -> None:
        """Begin the account of the next step."""
        self._here = 0.0

    def fits(self, seconds: float) -> bool:
        """Return whether a probe of so many seconds may follow the step that has just ended. The first one may."""
        return self._here == 0.0 or self._here + seconds <= self.share

    def runs(self, seconds: float, sent: float, most: int, part: float = 1.0) -> int:
        """Return how many runs of so many seconds and bytes each fit after this step, at least 1, at most ``most``.

        ``part``: share of the whole budget that may be used.
        """
        room = min(self.share - self._here, part * self._seconds - self.seconds)
        bytes_left = part * self._bytes - self.bytes
        fitting = [left / each for left, each in ((room, seconds), (bytes_left, sent)) if each > 0]
        return max(1, int(min([most, *fitting])))

    def allows(self, seconds: float, sent: float, part: float = 1.0) -> bool:
        """Return whether so many more seconds and bytes fit into ``part``, a share of the whole budget."""
        return self.seconds + seconds <= part * self._seconds and self.bytes + sent <= part * self._bytes
