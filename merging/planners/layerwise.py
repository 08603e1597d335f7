# SPDX-License-Identifier: Apache-2.0
"""Planner of wait-free backpropagation: every tensor leaves by itself, as soon as it is ready."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from merging.costs import Costs
from merging.plan import Plan
from merging.planner import Planner
from merging.profile import Profile


@dataclass(frozen=True, repr=False, kw_only=True)
class Layerwise(Planner):
    """Planner with a merge buffer for every tensor: the most overlap, and n start-ups.

    The optimum where a start-up costs nothing; elsewhere the baseline to beat. Source: wait-free
    backpropagation (Zhang et al., Poseidon, USENIX ATC 2017), the WFBP of arXiv 1811.11141.
    """

    name: ClassVar[str] = "layerwise"
    timed: ClassVar[bool] = False

    def partition(self, profile: Profile, costs: Costs, mode: str) -> Plan:
        return Plan((1,) * len(profile))
