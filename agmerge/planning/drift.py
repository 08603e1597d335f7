"""Detect that a plan no longer fits: measured times have drifted away from those that it was made for."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

import merging
from agmerge.metrics.step_times import Seconds
from agmerge.planning.plan_choice import predicted_exchange_seconds, predicted_finish
from merging import Measurements
from merging.checks import Elements

STEADY = (0.8, 1.25)  # an exchange within these, of what it took after the plan was made, is as it was
LATE = 0.15  # of the finish: backward that moved by less is as it was
CONFIRMATIONS = 2  # looks in a row that must see a change


class Finding(IntEnum):
    """Say what a look at the measured times calls for; of two findings the larger one counts."""

    KEEP = 0  # nothing: times are as they were when the plan was made
    PLAN = 1  # another plan, from the costs as they are known
    PROBE = 2  # another plan, from costs that are measured anew


class DriftDetector:
    """Compare looks at the measured times of one plan with what it was made from. Rank 0's; nothing communicates."""

    def __init__(self) -> None:
        self._findings: list[Finding] = []  # of the looks since the plan was made, or confirmed
        # Seconds of exchanges, measured / predicted, in the first of these looks; None: there was none.
        self.usual_ratio: float | None = None

    def restart(self, usual_ratio: float | None = None) -> None:
        """Begin anew: a plan was made. The next look says how long exchanges take beside the prediction.

        ``usual_ratio``: what an earlier run with this plan has found that they do.
        """
        self._findings, self.usual_ratio = [], usual_ratio

    def look(
        self, plan: merging.Plan, planned_from: Measurements, ready: Seconds, travel: Seconds, load: Elements
    ) -> Finding:
        """Return what is to be done: something if ``CONFIRMATIONS`` looks in a row have seen a change.

        Args:
            plan: the one in use.
            planned_from: what it was made from, or what was measured last without a better one.
            ready: when each tensor is ready, (n,), on the slowest rank.
            travel: seconds of each merge buffer's exchange, (W, m). The rank that came last to an exchange saw it as
                it is; the others waited for that one, so the minimum counts.
            load: elements that each tensor sends from now on, (n,). If they are others, there is no doubt.
        """
        ratio = float(travel.min(axis=0).sum() / predicted_exchange_seconds(plan, planned_from).sum())
        if self.usual_ratio is None:
            self.usual_ratio = ratio
        if not np.array_equal(load, planned_from.profile.load):
            return Finding.PLAN
        finding = Finding.KEEP
        if abs(ready[-1] - planned_from.profile.backward.sum()) > LATE * predicted_finish(plan, planned_from):
            finding = Finding.PLAN
        if not STEADY[0] <= ratio / self.usual_ratio <= STEADY[1]:
            finding = Finding.PROBE
        self._findings.append(finding)
        recent = self._findings[-CONFIRMATIONS:]
        confirmed = len(recent) == CONFIRMATIONS and Finding.KEEP not in recent
        return max(recent) if confirmed else Finding.KEEP
