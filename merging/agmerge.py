"""AGMerge: the same tensors in every merge phase on all workers, and phases sized to overlap what they can."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from merging.checks import flag, whole
from merging.costs import Costs
from merging.exact import optimum
from merging.plan import Plan
from merging.planner import Planner
from merging.profile import Profile
from merging.waiting import greedy

SOLVERS = ("exact", "greedy")
LARGEST = 1000  # tensors up to which "exact" is the optimum: its tables grow with the square


@dataclass(frozen=True, repr=False, kw_only=True)
class AGMerge(Planner):
    """Merge so that making a merge buffer overlaps the exchange of the one before: AGMerge, inter- and intra-worker."""

    name: ClassVar[str] = "agmerge"
    intra: bool = True
    solver: str = "exact"
    phases: int = 4
    check_every: int = 25
    gain: float = 0.03

    def __post_init__(self) -> None:
        object.__setattr__(self, "intra", flag("agmerge: intra", self.intra))
        if self.solver not in SOLVERS:
            raise ValueError(f"agmerge: solver is {self.solver!r}: use one of {', '.join(SOLVERS)}")
        object.__setattr__(self, "phases", whole("agmerge: phases", self.phases, least=1))
        object.__setattr__(self, "check_every", whole("agmerge: check_every", self.check_every, least=0))
        object.__setattr__(self, "gain", _share("agmerge: gain", self.gain))

    def partition(self, profile: Profile, costs: Costs, mode: str) -> Plan:
        if not self.intra:
            return Plan(equal_counts(len(profile), self.phases))
        if self.solver == "exact" and len(profile) <= LARGEST:
            return optimum(profile, costs, mode)
        return greedy(profile, costs, mode)


def equal_counts(n: int, phases: int) -> tuple[int, ...]:
    """Return tensors per merge buffer for min(phases, n) of them that differ by one tensor at most, larger first."""
    least, more = divmod(n, min(phases, n))
    return (least + 1,) * more + (least,) * (min(phases, n) - more)


def _share(what: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{what} is {value!r}: give a number")
    if not 0 <= value < 1:
        raise ValueError(f"{what} is {value}: it must be at least 0 and below 1")
    return float(value) + 0.0
