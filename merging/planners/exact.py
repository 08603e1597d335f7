"""Find the optimum under the model."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, ClassVar

from merging.checks import Reals, whole
from merging.costs import Costs
from merging.plan import Plan
from merging.planner import Planner
from merging.planners.search.bounds import WEIGHTS, earliest, latest
from merging.planners.search.frontier import Found, Spent, Work, search
from merging.planners.search.greedy import greedy
from merging.planners.search.tables import Tables, tables
from merging.profile import Profile
from merging.size_limit import cut
from merging.timeline import predict

_ROUNDING = 1e-9  # share of a finish by which sums in another order may differ
_NARROW = 6  # states a prefix in the search for a good plan
_GAPS = (
    0.0005,
    0.0015,
    0.004,
    0.02,
    0.06,
    0.15,
    0.4,
    1.0,
    3.0,
)  # above the lower bound, guesses of the finish, as shares of it
# Weights of the bounds, states a prefix in a narrow search before, extensions that the complete searches may try.
# Sharp bounds take long to make, and pay where the search would take longer.
_LITTLE = 50_000  # extensions
_RUNGS = ((WEIGHTS, None, 500_000), (33, 32, 2_000_000), (129, 64, None))


@dataclass(frozen=True, repr=False, kw_only=True)
class Exact(Planner):
    """Find the plan that ends first, of all plans of runs below 2**31 elements, dense merge buffers included.

    Of plans that end at the same time it is one with the fewest merge buffers. O(n^2) time and memory where
    readiness is the same in every plan (mode "dense", and "ahead" without dense merge buffers); elsewhere
    times the states that none beats: few in practice, but many where dense and sparse cost nearly the same,
    which has taken minutes at 600 tensors. `budget` bounds that work: the number of states times merge buffers
    that may be tried, a second being 10 to 20 million; beyond it, the best plan found so far is returned, never
    one that ends later than the greedy of `agmerge`. None, the default, is no bound. It counts work, not
    time: the plan is the same in every process. Source: dynamic programs of our own; MG-WFBP (arXiv
    1912.09268) and OMGS-SGD state the problem and solve it greedily.

    It is the optimum over partitions in which every merge buffer travels whole (`Plan.parts` 1): `divide` may end
    a plan sooner.
    """

    name: ClassVar[str] = "exact"
    budget: int | None = None

    def __post_init__(self) -> None:
        if self.budget is not None:
            object.__setattr__(self, "budget", whole("exact: budget", self.budget, least=0))

    def partition(self, profile: Profile, costs: Costs, mode: str) -> Plan:
        return optimum(profile, costs, mode, self.budget)


def optimum(profile: Profile, costs: Costs, mode: str, budget: int | None = None) -> Plan:
    """Return the plan with the smallest predicted finish; of several, one with the fewest merge buffers.

    Where readiness is the same in every plan, `earliest` knows that finish. Elsewhere narrow searches find a
    plan that is close, and the search of all states that can end by its finish the optimum: first with cheap
    bounds, then with sharp ones. With the optimum's finish as the bound, `search` runs for the fewest merge
    buffers. Where a `budget` of extensions (see `search`) is spent before, the result is the best plan so far, or
    the optimum with more merge buffers than needed.
    """
    table = tables(profile, costs, mode)
    problem = _Problem(table, *earliest(table), Work(budget))
    if table.fixed:
        finish = float(problem.channel[-1])
        try:
            return problem.sure(finish, fewest=True)[0]
        except Spent:
            return problem.sure(finish, work=Work())[0]
    n = len(profile)
    ends = [(plan, predict(plan, profile, costs, mode).finish) for plan in (Plan((1,) * n), cut(Plan((n,)), profile))]
    known, proven = _climb(problem, min(ends, key=itemgetter(1)))
    if proven:
        return known[0]
    simple = cut(greedy(profile, costs, mode), profile)
    return _sooner(known, (simple, predict(simple, profile, costs, mode).finish))[0]


def _climb(problem: _Problem, known: Found) -> tuple[Found, bool]:
    """Return the optimum and True, or the best of `known` and what was found before the work was spent, and False."""
    proven = False
    try:
        known = problem.close(known)
        with suppress(Spent):  # where little is open below that, both questions at once
            return problem.sure(known[1], fewest=True, work=Work(_LITTLE, problem.work)), True
        for weights, width, most in _RUNGS:
            if width is not None and not proven:
                known = _sooner(known, problem.found(known[1], weights, width=width))
            part = Work(most, problem.work)
            try:
                if not proven:
                    known = _sooner(known, problem.sure(known[1], weights, work=part))
                proven = True
                return problem.sure(known[1], weights, fewest=True, work=part), True
            except Spent:
                if problem.work.spent:
                    break
    except Spent:
        pass
    return known, proven


@dataclass(frozen=True)
class _Problem:
    """Search one problem again and again, with closer and closer bounds."""

    table: Tables  # what every possible merge buffer costs
    clock: Reals  # by prefix, the earliest compute clock, (n + 1,)
    channel: Reals  # by prefix, the earliest channel clock, (n + 1,)
    work: Work  # that is left for all searches

    def found(self, finish: float, weights: int = WEIGHTS, **how: Any) -> Found | None:
        """Return what `search` finds that ends by `finish`."""
        bounds = latest(self.table, self.clock, self.channel, finish, weights)
        return search(self.table, bounds, **{"work": self.work, **how})

    def sure(self, finish: float, weights: int = WEIGHTS, **how: Any) -> Found:
        """Return the same where a plan is known to end at `finish`, up to rounding."""
        found = self.found(finish * (1 + _ROUNDING), weights, **how)
        assert found is not None
        return found

    def close(self, known: Found) -> Found:
        """Return a good plan: guesses from the lower bound upwards, until a plan keeps one; or `known`."""
        for gap in _GAPS:
            guess = float(self.channel[-1]) * (1 + gap)
            if guess >= known[1]:
                break
            found = self.found(guess, width=_NARROW)
            if found is not None:
                return _sooner(known, found)
        return known


def _sooner(known: Found, found: Found | None) -> Found:
    """Return the one that ends first, `known` of equals."""
    return found if found is not None and found[1] < known[1] else known
