# SPDX-License-Identifier: Apache-2.0
"""Drift: a plan no longer fits, because times have changed since it was made."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

import merging
from agmerge.metrics.step_times import Seconds
from agmerge.planning.plan_choice import predicted_exchange_seconds, predicted_finish
from merging import Measurements
from merging.checks import Elements

STEADY = (0.8, 1.25)  # times the exchange seconds after the plan was made: within these, unchanged
LATE = 0.15  # of the finish: backward that moved by less is unchanged
CONFIRMATIONS = 2  # looks in a row that must see a change


class Finding(IntEnum):
    """Conclusion from measured times; of two findings the larger one counts."""

    KEEP = 0  # nothing: times are as they were when the plan was made
    PLAN = 1  # another plan, from the known costs
    PROBE = 2  # another plan, from costs that are measured again


class DriftDetector:
    """Comparison of measured times with the measurements behind the plan in use. Rank 0's; nothing communicates."""

    def __init__(self) -> None:
        self._findings: list[Finding] = []  # of the looks since the plan was made, or confirmed
        # Seconds of exchanges, measured / predicted, in the first of these looks; None: there was none.
        self._usual_ratio: float | None = None

    def restart(self) -> None:
        """Begin again: a plan was made. The next look shows how long exchanges take, relative to the prediction."""
        self._findings, self._usual_ratio = [], None

    def look(
        self, plan: merging.Plan, planned_from: Measurements, ready: Seconds, travel: Seconds, load: Elements
    ) -> Finding:
        """Return the finding: other than KEEP if ``CONFIRMATIONS`` looks in a row have seen a change.

        Args:

            plan: the one in use.
            planned_from: the measurements behind it, or the last ones that led to no better plan.
            ready: when each tensor is ready, (n,), on the slowest rank.
            travel: seconds of each merge buffer's exchange, (W, m). The last rank to reach an exchange sees its own
                duration; the others waited for that rank, so the minimum counts.
            load: elements that each tensor sends from now on, (n,). Other loads than before need no confirmation.
        """
        ratio = float(travel.min(axis=0).sum() / predicted_exchange_seconds(plan, planned_from).sum())
        if self._usual_ratio is None:
            self._usual_ratio = ratio
        if not np.array_equal(load, planned_from.profile.load):
            return Finding.PLAN
        finding = Finding.KEEP
        if abs(ready[-1] - planned_from.profile.backward.sum()) > LATE * predicted_finish(plan, planned_from):
            finding = Finding.PLAN
        if not STEADY[0] <= ratio / self._usual_ratio <= STEADY[1]:
            finding = Finding.PROBE
        self._findings.append(finding)
        recent = self._findings[-CONFIRMATIONS:]
        confirmed = len(recent) == CONFIRMATIONS and Finding.KEEP not in recent
        return max(recent) if confirmed else Finding.KEEP
