# SPDX-License-Identifier: Apache-2.0
"""AGMerge planner: the same tensors in every merge phase on all workers, and phases sized for the most overlap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from merging.checks import flag, whole
from merging.costs import Costs
from merging.message_split import MOST
from merging.pieces import Pieces, in_pieces
from merging.plan import Plan
from merging.planner import Planner
from merging.planners.exact import optimum
from merging.planners.search.greedy import greedy
from merging.profile import Profile

SOLVERS = ("exact", "greedy")
LARGEST = 1000  # tensors up to which the optimum is searched: its tables grow with the square
BUDGET = 2_000_000  # extensions of states, some 0.2 s


@dataclass(frozen=True, repr=False, kw_only=True)
class AGMerge(Planner):
    """Planner with phases of fixed tensors, sized so that making a merge buffer hides the exchange before it.

    Inter-worker: a merge phase is the same tensors on all workers, whatever their compressors selected, so
    that none waits for the others' merge buffers to fill; bytes may differ. `intra=False` is this rule alone:
    `phases` merge buffers of as equal a number of tensors as can be.

    Intra-worker: boundaries are chosen so that backward, selection and the exchange of the merge buffer before
    overlap. `solver="exact"` takes the plan that `exact` predicts to end first, up to 1000 tensors and 0.2 seconds
    or so of work, counted and not timed (see `budget` there); beyond 1000, and with `solver="greedy"`, it is
    the rule of `search.greedy`: send as soon as the channel is free and never leave it idle, for the
    best first merge buffer. On the grid of benchmarks/planning.py that ends at most 6.5 % later than the
    optimum, 0.01 % in the median. Only the choice of dense merge buffers was added to it.

    In training: `check_every` steps lie between two looks at the running averages of the measured times (0:
    never), and a new plan is taken only if it is predicted to end sooner by more than the share `gain`; its merge
    buffers travel in up to `parts` messages where that is predicted to end sooner (see `divide`; 1: never). Planning
    uses none of these.

    Source: AGMerge (INFOCOM 2025); FGBuff (USENIX ATC 2024 submission) and SAFusion (HPDC 2025) for the
    inter- and intra-worker idea. Both solvers are our own; `fgbuff` is the published code's.
    """

    name: ClassVar[str] = "agmerge"
    intra: bool = True
    solver: str = "exact"
    phases: int = 4
    check_every: int = 25
    gain: float = 0.03
    parts: int = MOST

    def __post_init__(self) -> None:
        object.__setattr__(self, "intra", flag("agmerge: intra", self.intra))
        if self.solver not in SOLVERS:
            raise ValueError(f"agmerge: solver must be one of {', '.join(SOLVERS)}, got {self.solver!r}")
        object.__setattr__(self, "phases", whole("agmerge: phases", self.phases, least=1))
        object.__setattr__(self, "check_every", whole("agmerge: check_every", self.check_every, least=0))
        object.__setattr__(self, "gain", _share("agmerge: gain", self.gain))
        object.__setattr__(self, "parts", whole("agmerge: parts", self.parts, least=1))

    @property
    def recheck_every(self) -> int:  # type: ignore[override]  # an option of this planner, a constant of all others
        """Return the option `check_every`."""
        return self.check_every

    @property
    def min_gain(self) -> float:  # type: ignore[override]
        """Return the option `gain`."""
        return self.gain

    @property
    def max_messages(self) -> int:  # type: ignore[override]
        """Return the option `parts`."""
        return self.parts

    @in_pieces
    def partition(self, profile: Profile, costs: Costs, mode: str) -> Pieces[Plan]:
        if not self.intra:
            return Plan(equal_counts(len(profile), self.phases))
        if self.solver == "exact" and len(profile) <= LARGEST:
            return (yield from optimum(profile, costs, mode, BUDGET))
        return (yield from greedy(profile, costs, mode))


def equal_counts(n: int, phases: int) -> tuple[int, ...]:
    """Return tensors per merge buffer for min(phases, n) of them that differ by one tensor at most, larger first."""
    least, more = divmod(n, min(phases, n))
    return (least + 1,) * more + (least,) * (min(phases, n) - more)


def _share(what: str, value: object) -> float:
    """Return `value` as a float. Raises TypeError where it is no number, ValueError unless 0 <= value < 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{what} is {value!r}: expected a number")
    if not 0 <= value < 1:
        raise ValueError(f"{what} must be at least 0 and below 1, got {value}")
    return float(value) + 0.0
