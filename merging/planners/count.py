# SPDX-License-Identifier: Apache-2.0
"""Planner with the same number of tensors in every merge buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from merging.checks import whole
from merging.costs import Costs
from merging.plan import Plan
from merging.planner import Planner
from merging.profile import Profile


@dataclass(frozen=True, repr=False, kw_only=True)
class Count(Planner):
    """Planner that closes a merge buffer at every `tensors`-th tensor; the last one has the remainder.

    Knows neither sizes nor times. Source: the fixed counts that FGBuff's and ADTopk's experiments use;
    10 is the number of FGBuff's OMGS baseline for a model without one of its own.
    """

    name: ClassVar[str] = "count"
    timed: ClassVar[bool] = False
    tensors: int = 10

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", whole("count: tensors", self.tensors, least=1))

    def partition(self, profile: Profile, costs: Costs, mode: str) -> Plan:
        return Plan(even_counts(len(profile), self.tensors))


def even_counts(n: int, tensors: int) -> tuple[int, ...]:
    """Return tensors per merge buffer: `tensors` each, and the remainder of n, if any, in a last one."""
    full, last = divmod(n, tensors)
    return (tensors,) * full + (last,) * (last > 0)
