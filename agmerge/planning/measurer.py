# SPDX-License-Identifier: Apache-2.0
"""Measurements for plans, made between steps: the times of steps, and the results of probes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from agmerge.metrics.running_times import RunningStepTimes
from agmerge.metrics.step_times import Seconds
from agmerge.metrics.whole_steps import WholeSteps
from agmerge.planning.cost_probe import MeasuredCosts
from agmerge.planning.measuring import gather_seconds, measurements, profile
from agmerge.planning.probe_budget import Budget
from agmerge.planning.seen_messages import SeenMessages, measure_costs, seen_in
from agmerge.step.merge_buffers import MergeBuffers
from merging import Measurements


class Look(NamedTuple):
    """Typical times of the steps since the last look; the same on every rank."""

    ready: Seconds  # when each tensor is ready, on the slowest rank, since the first; (n,)
    making: Seconds  # processor time of each merge buffer's messages, of every rank; (W, m)
    travel: Seconds  # of each merge buffer's exchange, of every rank; (W, m)
    step: float  # seconds of a whole step, on the slowest rank


class Measurer:
    """Measurer for the plans of one agreement. A subclass may measure more, or differently."""

    def __init__(self, buffers: MergeBuffers, times: RunningStepTimes) -> None:
        self.buffers, self.times = buffers, times  # read, and never changed here but for restart() of averages
        self.whole = WholeSteps()
        self.bytes_probed = 0  # handed to collectives by probes, by the rank that sent most

    def look(self) -> Look:
        """Collective. Return the averages of all ranks, and begin new ones."""
        own = self.times.ready(), self.times.making(), self.times.travel(), np.array([self.whole.typical()])
        ready, making, travel, step = gather_seconds(self.buffers, *own)
        self.times.restart()
        return Look(ready.max(axis=0), making, travel, float(step.max()))

    def measure(self, step: int, look: Look | None = None, *, at_once: bool = False) -> Iterator[Measurements | None]:
        """Collective. Measure a part at each ``next``, between steps, and yield None; yield the measurements last.

        Args:

            step: the one to come.
            look: the times of steps; None: they are asked for.
            at_once: nothing is left for later steps.
        """
        look = self.look() if look is None else look
        budget = Budget(look.step, 4 * self.buffers.layout.numel, at_once=at_once)
        before = self.bytes_probed
        if budget.is_spread:  # the exchange of times has taken time, too
            yield None
        for costs in measure_costs(self.buffers, step, float(look.ready[-1]), budget, self.seen(step, look)):
            self.bytes_probed = before + int(budget.bytes)
            if costs is None or not budget.fits(budget.share):  # no probe and no plan after the same step
                yield None
            if costs is not None:
                yield self.with_costs(step, look.ready, costs)

    def seen(self, step: int, look: Look) -> SeenMessages | None:
        """Return what steps have shown of their messages; None: nothing that bounds the results of probes."""
        return seen_in(self.buffers.plan, profile(self.buffers, look.ready, step), look.making, look.travel)

    def with_costs(self, step: int, ready: Seconds, costs: MeasuredCosts) -> Measurements:
        """Collective. Return the measurements for planning; rank 0's counts.

        Args:

            step: the one to come.
            ready: when each tensor is ready, (n,).
            costs: of selection and exchanges.
        """
        return measurements(self.buffers, step, ready, costs)
