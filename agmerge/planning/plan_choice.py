# SPDX-License-Identifier: Apache-2.0
"""Choice of the best plan for given measurements, and its prediction: pure functions.

``planner`` is the one in training, ``buffers`` the merge buffers in use; neither is changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

import merging
from agmerge.exchanges.send_mode import AHEAD, send_mode
from agmerge.exchanges.table import EXCHANGES
from agmerge.metrics.step_times import Seconds
from agmerge.step.agreement import with_mode
from agmerge.step.merge_buffers import MergeBuffers
from merging import Measurements
from merging.pieces import pieces_of


@dataclass(frozen=True, repr=False, kw_only=True)
class FixedCounts(merging.Planner):
    """Planner that keeps a partition; which merge buffers are dense, and in how many messages, is still chosen."""

    name: ClassVar[str] = "fixed"
    timed: ClassVar[bool] = False
    counts: tuple[int, ...]  # tensors per merge buffer

    def partition(self, profile: merging.Profile, costs: merging.Costs, mode: str) -> merging.Plan:
        return merging.Plan(self.counts)


def planner_of(buffers: MergeBuffers, planner: merging.Planner) -> merging.Planner:
    """Return the planner, unless the script's groups say which tensors share a message."""
    return planner if buffers.config.merging.groups is None else FixedCounts(counts=buffers.plan.counts)


def best_plan(planner: merging.Planner, buffers: MergeBuffers, measured: Measurements) -> merging.Pieces[merging.Plan]:
    """Return, in pieces, the plan with which the planner predicts steps to end first.

    Its merge buffers are divided into messages where that helps.
    """
    fitting = planner_of(buffers, planner)
    plan, mode = yield from pieces_of(merging.best, fitting, measured)
    if fitting.max_messages > 1 and EXCHANGES[buffers.exchange].pipelines_parts:
        most = fitting.max_messages
        plan = yield from pieces_of(merging.divide, plan, measured.profile, measured.costs, mode, most)
    return with_mode(plan, mode)


def mode_of(plan: merging.Plan, measured: Measurements) -> str:
    """Return the mode in which ``plan`` is to be predicted: "ahead" by its labels, else the other allowed one."""
    return AHEAD if send_mode(plan).ahead else next((mode for mode in measured.modes if mode != AHEAD), AHEAD)


def predicted_finish(plan: merging.Plan, measured: Measurements) -> float:
    """Return when the last exchange is predicted to end, in seconds since backward began."""
    return merging.predict(plan, measured.profile, measured.costs, mode_of(plan, measured)).finish


def predicted_exchange_seconds(plan: merging.Plan, measured: Measurements) -> Seconds:
    """Return the seconds that each merge buffer's exchange is predicted to take, (m,)."""
    timeline = merging.predict(plan, measured.profile, measured.costs, mode_of(plan, measured))
    return np.array([span.end - span.start for span in timeline.spans])
