# SPDX-License-Identifier: Apache-2.0
"""Planners of the optimum under the cost model: `exact` of all plans, `agmerge` of phases with fixed tensors."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import ClassVar

from merging.costs import Costs, Profile
from merging.pieces import Pieces, in_pieces
from merging.plan import Plan, flag, whole
from merging.planner import Planner
from merging.planners.search.frontier import Bounds, Found, Path, Spent, Work, bound, edges_of, greedy, search, turned
from merging.planners.search.tables import Tables, tables
from merging.timeline import MOST

# `exact`.

_ROUNDING = 1e-9  # share of a finish by which sums in another order may differ
# Weights of ever closer bounds, and extensions that the search of the remaining plans may then try.
_RUNGS = ((9, 200_000), (9, 200_000), (33, 500_000), (129, None))
_SHIFTS = (0, -1, 1)  # plans that follow the bounds: by the weight of the state, and by those beside it
_NARROW = 2  # states a prefix in the search for a good plan among very many
_PASSED = 16  # edges times weights that a pass of bounds looks at in the time of one extension


@dataclass(frozen=True, repr=False, kw_only=True)
class Exact(Planner):
    """Planner of the earliest end, of all plans of runs below 2**31 elements, dense merge buffers included.

    Of plans that end at the same time it is one with the fewest merge buffers. O(n^2) memory, and O(n^2) time times the
    states that no other beats and that can still be the best: few, but for the choice of dense merge buffers. With it
    the problem has that of dividing numbers into two sets of equal sums, without known quick method. Where dense
    and sparse cost nearly the same it has taken minutes at 600 tensors. `budget` bounds that work: the number of
    extensions of states that may be tried, a second being about 10 million; beyond it, the best plan found so far is
    returned. None, the default, is no bound. It counts work, not time: the plan is the same in every process. Source:
    dynamic programs of our own; MG-WFBP (arXiv 1912.09268) and OMGS-SGD state the problem and solve it greedily.

    It is the optimum over partitions in which every merge buffer is one message (`Plan.parts` 1): `divide` may end
    a plan sooner.
    """

    name: ClassVar[str] = "exact"
    budget: int | None = None

    def __post_init__(self) -> None:
        if self.budget is not None:
            object.__setattr__(self, "budget", whole("exact: budget", self.budget, least=0))

    @in_pieces
    def partition(self, profile: Profile, costs: Costs, mode: str) -> Pieces[Plan]:
        return (yield from optimum(profile, costs, mode, self.budget))


def optimum(profile: Profile, costs: Costs, mode: str, budget: int | None = None) -> Pieces[Plan]:
    """Return, in pieces, the plan with the smallest predicted finish; of several, one with the fewest merge buffers.

    Plans that follow the bounds are good ones, soon; then only plans that may end sooner are searched. Where
    these are too many, bounds from the other end exclude more, then those of more weights. With several send modes the
    bounds are far from the optimum, and a narrow search finds better plans first. Where a `budget` of
    extensions (see `search`) is spent before, the result is the best plan so far.
    """
    table = yield from tables(profile, costs, mode)
    edges = yield from edges_of(table)
    back = edges.reversed()
    known: Found = (Plan((1,) * len(profile)), math.inf)
    ahead: Bounds | None = None
    behind: Bounds | None = None
    opened, work = edges.all_open(), Work(budget)
    with suppress(Spent):
        for weights, most in _RUNGS:
            if ahead is not None:
                work.spend(2 * weights * int(opened.sum()) // _PASSED)
                behind, opened = yield from bound(back, weights, turned(opened), ahead, _in_time(known, edges.grain))
                known = _soonest(known, *(_found(table, *behind.follow(back, shift), True) for shift in _SHIFTS))
                opened = turned(opened)
            ahead, opened = yield from bound(edges, weights, opened, behind, _in_time(known, edges.grain))
            known = _soonest(known, *(_found(table, *ahead.follow(edges, shift)) for shift in _SHIFTS))
            try:
                part = Work(most, work)
                best = yield from search(table, ahead, opened, _in_time(known, edges.grain), edges.grain, part)
                return (best or known)[0]
            except Spent:
                if work.spent:
                    break
            if behind is not None and edges.options > 1:
                finish = _in_time(known, edges.grain)
                narrow = yield from search(table, ahead, opened, finish, edges.grain, work, _NARROW)
                known = _soonest(known, narrow)
    return known[0]


def _in_time(known: Found, grain: float) -> float:
    """Return when plans must end to be as good as `known`, up to rounding."""
    return known[1] + (grain / 4 if grain else _ROUNDING * known[1])


def _found(table: Tables, path: Path, finish: float, backwards: bool = False) -> Found:
    """Return the plan of a path, and `finish`, its end; `backwards`: a path of the reversed problem."""
    if backwards:
        path = [(table.n - 1 - last, table.n - 1 - first, option) for first, last, option in reversed(path)]
    counts = tuple(last + 1 - first for first, last, _ in path)
    return Plan(counts, tuple(bool(table.options[option].dense[last, first]) for first, last, option in path)), finish


def _soonest(*found: Found | None) -> Found:
    """Return the plan that ends first, the first of equals."""
    return min((one for one in found if one is not None), key=itemgetter(1))


# `agmerge`: the same tensors in every merge phase on all workers.

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
