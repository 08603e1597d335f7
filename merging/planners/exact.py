# SPDX-License-Identifier: Apache-2.0
"""Planner of the optimum under the cost model."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import ClassVar

from merging.checks import whole
from merging.costs import Costs
from merging.pieces import Pieces, in_pieces
from merging.plan import Plan
from merging.planner import Planner
from merging.planners.search.bounds import Bounds, Path, bound
from merging.planners.search.edges import edges_of, turned
from merging.planners.search.frontier import Found, Spent, Work, search
from merging.planners.search.tables import Tables, tables
from merging.profile import Profile

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
