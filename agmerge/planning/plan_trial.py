"""Two plans, a few steps each: what a prediction promises must be seen in the time of whole steps."""

from __future__ import annotations

import statistics
import time

import merging

STEPS = 6  # of each plan; the first of them is not counted


class Trial:
    """Trains with one plan after the other, and times whole steps of this rank."""

    def __init__(self, *plans: merging.Plan) -> None:
        self.plans = plans
        self._took: list[list[float]] = [[] for _ in plans]
        self._steps = 0
        self._before = time.perf_counter()

    def after_step(self) -> merging.Plan | None:
        """A step has ended: the plan to go on with if it is the next one's turn."""
        now = time.perf_counter()
        self._took[self._steps // STEPS].append(now - self._before)
        self._steps, self._before = self._steps + 1, now
        turn, first = divmod(self._steps, STEPS)
        return self.plans[turn] if first == 0 and turn < len(self.plans) else None

    @property
    def over(self) -> bool:
        """Whether every plan has had its steps."""
        return self._steps == STEPS * len(self.plans)

    def seconds(self) -> list[float]:
        """The median step of each plan."""
        return [statistics.median(took[1:]) for took in self._took]
