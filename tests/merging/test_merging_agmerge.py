# SPDX-License-Identifier: Apache-2.0
"""agmerge: its two rules, the bounds of its greedy solver, and what bounded work does to the exact one."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import planning
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from speed import shapes
from support.planning_problems import instance

import merging
from merging import MODES, Costs, Plan, Profile, predict
from merging.pieces import pieces_of, run_to_end
from merging.planners.exact import AGMerge, equal_counts, optimum
from merging.planners.search.frontier import Spent, Work, greedy

EXACT, GREEDY = merging.get("exact"), merging.get("agmerge", solver="greedy")
QUICK = settings(deadline=None)


def finish(plan: Plan, model: Profile, costs: Costs, mode: str) -> float:
    return predict(plan, model, costs, mode).finish


def by_the_rule(model: Profile, costs: Costs, mode: str) -> list[tuple[float, int]]:
    """Finish and merge buffers for every first boundary, one tensor at a time; without dense merge buffers."""
    n, found = len(model), []
    for f in range(1, n + 1):
        counts, clock, channel, start = [], 0.0, 0.0, 0
        for j in range(n):
            clock += model.backward[j] + (costs.sparsify(model.work[j]) if mode == "ahead" else 0.0)
            ready = clock + (costs.sparsify(model.work[start : j + 1].sum()) if mode == "behind" else 0.0)
            if j + 1 == f or j + 1 == n or (j + 1 > f and ready >= channel):
                channel = max(channel, ready) + costs.exchange(model.load[start : j + 1].sum())
                clock, start = ready, j + 1
                counts.append(j + 1 - sum(counts))
        found.append((finish(Plan(tuple(counts)), model, costs, mode), len(counts)))
    return found


@QUICK
@given(st.integers(0, 2**32), st.integers(1, 30), st.sampled_from(MODES))
def test_greedy_is_its_rule(seed: int, n: int, mode: str) -> None:
    model, costs = instance(random.Random(seed), n, False)
    plan = run_to_end(greedy(model, costs, mode))
    found = by_the_rule(model, costs, mode)
    soonest = min(found)[0] * (1 + 1e-11)
    assert finish(plan, model, costs, mode) <= soonest and not any(plan.dense)
    assert len(plan.counts) <= max(buffers for end, buffers in found if end <= soonest)


def test_greedy_by_hand() -> None:
    """Ready at 1, 2, .., 8; an exchange takes 2 and 1 an element."""
    model = Profile(list("abcdefgh"), [1] * 8, [1.0] * 8)
    costs = Costs(lambda x: 0.0 * x, lambda x: 2.0 + x)
    # f = 1: ready 1, free 4; three more by 4, free 9; the rest by 8, free 15. f = 2: 2, 6 | 4: 6, 12 | 2: 12, 16.
    # f = 3: 3, 8 | 5: 8, 15, with one merge buffer less than f = 1.
    assert by_the_rule(model, costs, "dense")[:3] == [(15.0, 3), (16.0, 3), (15.0, 2)]
    assert GREEDY.plan(model, costs).counts == (3, 5)
    # Behind, selection takes 1 and delays all that follow: 2, 5 | 2: 5, 9 | 3: 9, 14 | 2: 12, 18.
    behind = Costs(lambda x: np.where(np.asarray(x) > 0, 1.0, 0.0), lambda x: 2.0 + x)
    assert by_the_rule(model, behind, "behind")[0] == (18.0, 4)
    assert finish(Plan((1, 2, 3, 2)), model, behind, "behind") == 18.0


@QUICK
@given(st.integers(0, 2**32), st.integers(1, 60), st.sampled_from(MODES), st.booleans())
def test_greedy_never_beats_exact_nor_loses_to_single(seed: int, n: int, mode: str, dense: bool) -> None:
    model, costs = instance(random.Random(seed), n, dense)
    plan = GREEDY.plan(model, costs, mode)
    plan.check(n, model.names)
    best = finish(EXACT.plan(model, costs, mode), model, costs, mode)
    assert best <= finish(plan, model, costs, mode) * (1 + 1e-11)
    assert finish(plan, model, costs, mode) <= finish(Plan((n,)), model, costs, mode) * (1 + 1e-11)
    if dense:
        assert finish(plan, model, costs, mode) <= finish(Plan((n,), (True,)), model, costs, mode) * (1 + 1e-11)


@QUICK
@given(st.integers(0, 2**32), st.integers(1, 25), st.sampled_from(MODES), st.booleans())
def test_greedy_does_not_depend_on_the_unit_of_time(seed: int, n: int, mode: str, dense: bool) -> None:
    model, costs = instance(random.Random(seed), n, dense)
    fast = Profile(model.names, model.numel, model.backward / 1024, work=model.work)

    def scaled(cost: Any) -> Any:
        return None if cost is None else lambda x: cost(x) / 1024

    less = Costs(scaled(costs.sparsify), scaled(costs.exchange), scaled(costs.dense))
    assert GREEDY.plan(fast, less, mode) == GREEDY.plan(model, costs, mode)


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.long)])
def test_greedy_over_the_grid(every: int) -> None:
    """At most 10 % later than the optimum, and 1 % in the median, on the shapes of real models."""
    over = []
    for model, density, workers, mode in list(planning.grid((8, 512)))[::every]:
        data, costs = planning.profile(shapes.sizes(model)), planning.costs(workers, density)
        best = finish(EXACT.plan(data, costs, mode), data, costs, mode)
        over.append(finish(GREEDY.plan(data, costs, mode), data, costs, mode) / best - 1)
    assert len(over) == -(-98 // every)
    assert -1e-9 <= min(over) and max(over) < 0.1 and statistics.median(over) < 0.01


@pytest.mark.slow
def test_greedy_where_merge_buffers_may_go_dense() -> None:
    """Going by the own end alone, 41 % later: dense first and sparse at the end is what is needed."""
    data, costs = planning.profile(shapes.sizes("bert-large")), planning.costs(8, 0.001, dense=True)
    for mode in ("ahead", "behind"):
        plan = GREEDY.plan(data, costs, mode)
        best = finish(run_to_end(optimum(data, costs, mode, 1_000_000)), data, costs, mode)
        assert finish(plan, data, costs, mode) < 1.05 * best and len(set(plan.dense)) == 2


@pytest.mark.slow
def test_solvers() -> None:
    for seed in range(20):
        model, costs = instance(random.Random(seed), 30, True)
        for mode in MODES:
            assert merging.get("agmerge").plan(model, costs, mode) == EXACT.plan(model, costs, mode)
    costs = planning.costs(8, 1.0)
    for n, which, other in ((1000, EXACT, GREEDY), (1001, GREEDY, EXACT)):
        model = planning.profile(planning.stretched("vit-large", n))
        plan = merging.get("agmerge").plan(model, costs)
        assert plan == which.plan(model, costs) != other.plan(model, costs)


@QUICK
@given(st.integers(1, 200), st.integers(1, 20))
def test_inter_has_equal_phases(n: int, phases: int) -> None:
    counts = equal_counts(n, phases)
    assert sum(counts) == n and len(counts) == min(phases, n) and max(counts) - min(counts) <= 1
    model = Profile([f"p{i}" for i in range(n)], np.arange(1, n + 1), np.zeros(n))
    costs = Costs(lambda x: 0.0 * x, lambda x: 1.0 * x)
    # Whatever a worker selects, its merge buffers hold the same tensors.
    for load in (np.zeros(n, int), np.arange(n)):
        other = Profile(model.names, model.numel, model.backward, load=load)
        plan = merging.get("agmerge", intra=False, phases=phases).plan(other, costs, "behind")
        assert plan.counts == counts


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"intra": 1}, TypeError, "agmerge: intra is 1"),
        ({"solver": "best"}, ValueError, "agmerge: solver must be one of exact, greedy, got 'best'"),
        ({"phases": 0}, ValueError, "agmerge: phases is 0"),
        ({"check_every": -1}, ValueError, "agmerge: check_every is -1"),
        ({"check_every": 2.5}, TypeError, "agmerge: check_every is 2.5"),
        ({"gain": 1}, ValueError, "agmerge: gain must be .*below 1, got 1"),
        ({"gain": -0.1}, ValueError, "agmerge: gain must be .*got -0.1"),
        ({"gain": float("nan")}, ValueError, "agmerge: gain must be .*got nan"),
        ({"gain": "3%"}, TypeError, "agmerge: gain is '3%'"),
    ],
)
def test_refuses_options(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        merging.get("agmerge", **options)
    with pytest.raises(ValueError, match="exact: budget is -1"):
        merging.get("exact", budget=-1)


def test_names_in_order_and_what_is_timed() -> None:
    listed = "layerwise single count threshold horovod mgwfbp omgs dear fgbuff agmerge agtf exact"
    assert merging.names() == tuple(listed.split())
    assert [name for name in merging.names() if not merging.get(name).timed] == listed.split()[:4]
    planner = merging.get("agmerge", gain=0, check_every=np.int64(0))
    assert repr(planner) == "agmerge(check_every=0, gain=0.0, intra=True, parts=8, phases=4, solver='exact')"


def test_untimed_planners_look_at_no_times() -> None:
    model, costs = instance(random.Random(2), 40, False)
    still = Profile(model.names, model.numel, np.zeros(40))
    free = Costs(lambda x: 0.0 * x, lambda x: 0.0 * x)
    for name in merging.names():
        planner = merging.get(name)
        if not planner.timed:
            assert planner.plan(model, costs, "behind") == planner.plan(still, free, "behind"), name


@pytest.mark.slow
def test_a_budget_bounds_the_work_and_not_the_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice near the trade-off, which has many states that none beats."""
    data, costs = planning.profile(planning.stretched("gpt2", 250)), planning.costs(8, 0.01, dense=True)
    spent = []

    def spend(self: Work, extensions: int, plain: Any = Work.spend) -> None:
        if self.whole is None:
            spent.append(extensions)
        plain(self, extensions)

    monkeypatch.setattr(Work, "spend", spend)
    best = finish(EXACT.plan(data, costs, "ahead"), data, costs, "ahead")
    needed, worst = sum(spent), finish(GREEDY.plan(data, costs, "ahead"), data, costs, "ahead")
    assert needed > 300_000 and worst > best
    ends = []
    for budget in (0, 1000, needed // 2, 2 * needed):
        spent.clear()
        plan = merging.get("exact", budget=budget).plan(data, costs, "ahead")
        assert sum(spent[:-1]) <= budget  # the last one was refused
        assert merging.get("exact", budget=budget).plan(data, costs, "ahead") == plan
        ends.append(finish(plan, data, costs, "ahead"))
    assert max(ends) <= worst and ends[-1] == best
    assert ends[2] < worst  # half the work is worth something


def test_work_is_shared() -> None:
    whole = Work(10)
    part = Work(7, whole)
    part.spend(6)
    assert (part.left, whole.left) == (1, 4)
    with pytest.raises(Spent):
        part.spend(2)
    with pytest.raises(Spent):
        Work(None, whole).spend(3)
    assert whole.spent and not Work().spent


@pytest.mark.parametrize("solver", ["exact", "greedy"])
@pytest.mark.parametrize("mode", MODES)
def test_a_plan_is_made_in_many_pieces(solver: str, mode: str) -> None:
    """One a tensor, at least, and with the choice of dense merge buffers: training goes on in between."""
    model, costs = instance(random.Random(5), 50, True)
    planner = merging.get("agmerge", solver=solver)
    pieces, count = pieces_of(planner.plan, model, costs, mode), 0
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            assert end.value == planner.plan(model, costs, mode) and count > len(model)
            break
        count += 1


@pytest.mark.parametrize("method", ["plan", "partition"])
def test_a_subclass_is_asked_for_what_it_says_itself(method: str) -> None:
    """Pieces of the class above it are not taken in its place."""
    model, costs = instance(random.Random(5), 6, False)

    def alone(
        self: merging.Planner, profile: merging.Profile, costs: merging.Costs, mode: str = "dense"
    ) -> merging.Plan:
        above = getattr(AGMerge, method)(self, profile, costs, mode)
        return replace(above, counts=(len(profile),), dense=(), labels=(), parts=())

    planner = type("Alone", (AGMerge,), {method: alone})()
    assert planner.plan(model, costs, "ahead").counts == (6,)
    assert run_to_end(pieces_of(planner.plan, model, costs, "ahead")).counts == (6,)
