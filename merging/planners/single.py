# SPDX-License-Identifier: Apache-2.0
"""Planner of one message per step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from merging.costs import Costs
from merging.plan import Plan
from merging.planner import Planner
from merging.profile import Profile


@dataclass(frozen=True, repr=False, kw_only=True)
class Single(Planner):
    """Planner with all tensors in one merge buffer: one start-up, and no overlap with backward.

    The optimum where backward takes no time. Source: the packed message of Sync-EASGD (You, Buluc and
    Demmel, SC 2017); no elastic averaging.
    """

    name: ClassVar[str] = "single"
    timed: ClassVar[bool] = False

    def partition(self, profile: Profile, costs: Costs, mode: str) -> Plan:
        return Plan((len(profile),))
