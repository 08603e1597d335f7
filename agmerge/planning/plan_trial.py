"""Train a few steps with each of several plans: what a prediction promises must be seen in the time of whole steps.

Which plans these are, ``candidates`` says: their labels say how they send, so a trial of value codecs is one of plans.
"""

from __future__ import annotations

import math
import statistics
import time

import merging

STEPS = 6  # of each plan; the first of them is not counted
HOPELESS = 1.2  # times as long as with another plan, or the one before: if all steps so far were, of at least
ENOUGH = 3  # steps, the first not counted, the turn of a plan ends
DOUBTFUL = 1.5  # times as late: a plan that is predicted to end later is not tried


class PlanTrial:
    """Train with one plan after the other, ``STEPS`` steps each or until it is hopeless, and time this rank's steps."""

    def __init__(self, *plans: merging.Plan, usual: float = math.inf) -> None:
        """Begin with the first of ``plans`` in the next step. ``usual``: seconds of a step with the plan before."""
        self.plans = plans
        self._usual = usual
        self._seconds: list[list[float]] = [[]]  # of each step, of the plans so far
        self._last_end = time.perf_counter()

    def count_step(self) -> bool:
        """Count a step that has ended; tell whether the plan in use has had its steps, as this rank sees it."""
        now = time.perf_counter()
        seconds = self._seconds[-1]
        seconds.append(now - self._last_end)
        self._last_end = now
        if len(seconds) == STEPS:
            return True
        best = min((statistics.median(others[1:]) for others in self._seconds[:-1]), default=math.inf)
        return len(seconds) >= ENOUGH and min(seconds[1:]) > HOPELESS * min(best, self._usual)

    def end_turn(self) -> merging.Plan | None:
        """Return the plan to go on with, which has the next turn; None if every plan has had one."""
        if len(self._seconds) == len(self.plans):
            return None
        self._seconds.append([])
        return self.plans[len(self._seconds) - 1]

    def seconds(self) -> list[float]:
        """Return the median step of each plan on this rank, in seconds."""
        return [statistics.median(seconds[1:]) for seconds in self._seconds]
