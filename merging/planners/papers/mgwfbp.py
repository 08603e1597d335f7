# SPDX-License-Identifier: Apache-2.0
"""MG-WFBP planner: wait for the next tensor when that costs less than a start-up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from merging.costs import Costs, Profile
from merging.plan import Plan, flag, whole
from merging.planner import Planner
from merging.planners.search.frontier import exchange, usable


@dataclass(frozen=True, repr=False, kw_only=True)
class MGWFBP(Planner):
    """Planner that merges the next tensor unless the exchange would end before it, or waiting costs alpha.

    A merge buffer could start at tau and end at tau + C; the next tensor is ready at r. They are merged iff
    r < tau + C, and r < tau or r - tau < alpha, where alpha is costs.exchange(0). `asc` merges only while
    the channel is still busy, r < tau (the ASC variant, meant for two exchanges at a time). `least`: a
    merge buffer below that many elements is merged in any case (0: never; the forks in DeAR, FGBuff and
    ADTopk use 8192).

    Source: Shi, Chu and Li, arXiv 1811.11141 (INFOCOM 2019) and 1912.09268 (TPDS), as in their code:
    alpha test and look-ahead of one tensor. Despite the title of "optimal", a greedy with no look further
    ahead: on alpha=6, beta=1, b=[0,5,6], p=[5,1,1] it merges the first two and finishes at 24, while 19 is
    possible (26 % more); `exact` is the optimum. Like the original it knows no selection: behind, its clock
    is backward alone; ahead, selection is part of when a tensor is ready.
    """

    name: ClassVar[str] = "mgwfbp"
    asc: bool = False
    least: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "asc", flag("mgwfbp: asc", self.asc))
        object.__setattr__(self, "least", whole("mgwfbp: least", self.least, least=0))

    def partition(self, profile: Profile, costs: Costs, mode: str) -> Plan:
        ready = usable(profile, costs, mode).tolist()
        numel = profile.numel.tolist()
        takes = exchange(profile, costs)
        alpha = 0.0 if self.asc else costs.exchange(0)
        counts = [1]
        first, size, free = 0, numel[0], 0.0
        for i in range(len(numel) - 1):
            starts = max(free, ready[i])
            ends = starts + takes(first, i + 1)
            comes = ready[i + 1]
            waits = comes < ends and (comes < starts or comes - starts < alpha)
            if waits or size < self.least:
                counts[-1] += 1
            else:
                counts.append(1)
                first, size, free = i + 1, 0, ends
            size += numel[i + 1]
        return Plan(tuple(counts))
