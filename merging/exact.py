"""The optimum under the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from merging.bounds import earliest, latest
from merging.checks import Reals
from merging.costs import Costs
from merging.frontier import search
from merging.plan import Plan
from merging.planner import Planner
from merging.profile import Profile
from merging.tables import Tables, tables
from merging.timeline import predict

_ROUNDING = 1e-9
_WIDTH = 6
_GAPS = (0.004, 0.02, 0.06, 0.15, 0.4, 1.0, 3.0)


@dataclass(frozen=True, repr=False, kw_only=True)
class Exact(Planner):
    """Of all plans of runs below 2**31 elements, dense merge buffers included, the one that ends first.

    Of plans that end at the same time, one with the fewest merge buffers. O(n^2) time and memory where
    readiness is the same in every plan (mode "dense", and "ahead" without dense merge buffers); elsewhere
    times the states that none beats, few in practice. Source: dynamic programs of our own;
    MG-WFBP (arXiv 1912.09268) and OMGS-SGD state the problem and solve it greedily.
    """

    name: ClassVar[str] = "exact"

    def partition(self, profile: Profile, costs: Costs, mode: str) -> Plan:
        return optimum(profile, costs, mode)


def optimum(profile: Profile, costs: Costs, mode: str) -> Plan:
    """Return the plan with the smallest predicted finish; of several, one with the fewest merge buffers.

    Where readiness depends on the plan, a few states a prefix give a plan that is close to the optimum,
    then all states that can end by its finish the optimum. `search` runs last with the optimum's finish as
    the bound, for the fewest merge buffers.
    """
    table = tables(profile, costs, mode)
    clock, channel = earliest(table)
    finish = float(channel[-1])
    if not table.fixed:
        finish = _close(table, clock, channel, predict(Plan((1,) * len(profile)), profile, costs, mode).finish)
        found = search(table, latest(table, clock, channel, finish * (1 + _ROUNDING)))
        assert found is not None
        finish = found[1]
    found = search(table, latest(table, clock, channel, finish * (1 + _ROUNDING)), fewest=True)
    assert found is not None
    return found[0]


def _close(table: Tables, clock: Reals, channel: Reals, known: float) -> float:
    """Return when a good plan ends: guesses from the lower bound upwards, until a plan keeps one; or `known`."""
    for gap in _GAPS:
        guess = float(channel[-1]) * (1 + gap)
        if guess >= known:
            break
        found = search(table, latest(table, clock, channel, guess), width=_WIDTH)
        if found is not None:
            return found[1]
    return known
