# SPDX-License-Identifier: Apache-2.0
"""exact: against every plan there is, against every other planner, at its limits, and in time."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import planning
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planning_problems import instance

import merging
from merging import MODES, Costs, Plan, Profile, predict
from merging.pieces import run_to_end
from merging.planners.search.frontier import Work, bound, edges_of, turned, unbeaten
from merging.planners.search.tables import tables
from merging.timeline import LIMIT

EXACT = merging.get("exact")


def brute(model: Profile, costs: Costs, mode: str) -> tuple[float, int]:
    """The best finish, and fewest merge buffers with it, of all plans: depth first, as `predict` adds."""
    n = len(model)
    upto = {what: np.concatenate([[0], np.cumsum(getattr(model, what))]) for what in ("numel", "work", "load")}

    def pairs(cost: Any, what: str) -> list[list[float]]:
        sums = upto[what][None, :] - upto[what][:, None]
        return cost(np.maximum(sums, 0)).tolist()  # type: ignore[no-any-return]

    wire, select = pairs(costs.exchange, "load"), pairs(costs.sparsify, "work")
    dense = None if costs.dense is None else pairs(costs.dense, "numel")
    if costs.message is not None:
        says = pairs(costs.message, "load")
        select = [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(select, says, strict=True)]
        if mode != "behind":
            select = says
    begin = 0.0 if costs.message is None else costs.message(0)
    plain = model.backward.tolist()
    ahead = (model.backward + costs.sparsify(model.work)).tolist() if mode == "ahead" else plain
    best = (float("inf"), 0)

    def extend(start: int, clock: float, free: float, buffers: int) -> None:
        nonlocal best
        if (free, buffers) >= best:
            return
        if start == n:
            best = (free, buffers)
            return
        sparse_clock = dense_clock = clock
        for stop in range(start + 1, n + 1):
            sparse_clock += ahead[stop - 1]
            dense_clock += plain[stop - 1]
            late = mode == "behind" or costs.message is not None
            ready = sparse_clock + (select[start][stop] if late else 0.0)
            extend(stop, ready, max(free, ready) + wire[start][stop], buffers + 1)
            if dense is not None:
                ready = dense_clock + begin
                extend(stop, ready, max(free, ready) + dense[start][stop], buffers + 1)

    extend(0, 0.0, 0.0, 0)
    return best


@pytest.mark.whole
@pytest.mark.parametrize("message", [False, True], ids=["", "message"])
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "choice"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cases", [110, pytest.param(1100, marks=pytest.mark.long)])
def test_equals_brute_force_to_the_bit(cases: int, mode: str, dense: bool, message: bool) -> None:
    rng = random.Random(f"{mode}{dense}{message or ''}")
    for case in range(cases):
        model, costs = instance(rng, 10 if case % 11 == 10 else rng.randint(1, 8), dense, message)
        plan = EXACT.plan(model, costs, mode)
        assert (predict(plan, model, costs, mode).finish, len(plan.counts)) == brute(model, costs, mode), case
        assert costs.dense is not None or not any(plan.dense)


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60), st.sampled_from(MODES), st.booleans(), st.booleans())
def test_no_other_planner_beats_it(seed: int, n: int, mode: str, dense: bool, message: bool) -> None:
    model, costs = instance(random.Random(seed), n, dense, message)
    plan = EXACT.plan(model, costs, mode)
    best = predict(plan, model, costs, mode).finish
    assert EXACT.plan(model, costs, mode).digest() == plan.digest()
    for name in merging.names():
        other = merging.get(name).plan(model, costs, mode)
        assert best <= predict(other, model, costs, mode).finish * (1 + 1e-11), name


def test_known_vectors() -> None:
    model = Profile(["a", "b", "c"], [5, 1, 1], [0.0, 5.0, 6.0])
    costs = Costs(lambda x: 0.0 * x, lambda x: 6.0 + x)
    assert EXACT.plan(model, costs).counts == (1, 2)
    model = Profile(["a", "b", "c"], [4, 4, 8], [3.0, 3.0, 0.0])
    costs = Costs(lambda x: x * np.log2(np.maximum(x, 1)), lambda x: 2.0 * (4 + x))
    plan = EXACT.plan(model, costs, "behind")
    assert plan.counts == (1, 1, 1) and predict(plan, model, costs, "behind").finish == 70


def test_limits_of_the_model() -> None:
    sizes = [3, 1, 4, 1, 5]
    names = list("abcde")
    free = Costs(lambda x: 0.0 * x, lambda x: 1.0 * x)
    slow = Costs(lambda x: 0.0 * x, lambda x: 8.0 + x)
    still, moving = Profile(names, sizes, [0.0] * 5), Profile(names, sizes, [9.0] * 5)
    assert EXACT.plan(still, slow).counts == (5,)
    layerwise = predict(Plan((1,) * 5), moving, free, "dense").finish
    assert predict(EXACT.plan(moving, free), moving, free, "dense").finish == layerwise
    nothing = Costs(lambda x: 0 * x, lambda x: 0 * x, lambda x: 0 * x)
    for mode in MODES:
        assert EXACT.plan(still, nothing, mode) == Plan((5,), names=tuple(names))


@pytest.mark.parametrize("mode", MODES)
def test_the_optimum_below_the_size_limit(mode: str) -> None:
    """Cut where it costs least, not at the last tensor that fits."""
    model = Profile(list("abc"), [LIMIT - 2, 1, 1], [0.0, 0.0, 0.0], load=[0, 5, 5], work=[0, 0, 0])
    costs = Costs(lambda x: 0.0 * x, lambda x: 1.0 + np.where(np.asarray(x) > 0, 5.0, 0.0))
    assert EXACT.plan(model, costs, mode).counts == (1, 2)
    model = Profile(list("ab"), [LIMIT - 1, LIMIT - 1], [0.0, 0.0])
    assert EXACT.plan(model, costs, mode).counts == (1, 1)


@pytest.mark.parametrize("mode", MODES)
def test_cost_functions_are_called_with_arrays_and_few_times(mode: str) -> None:
    calls = []

    def exchange(x: Any) -> Any:
        calls.append(np.ndim(x))
        return 1e-4 + 1e-9 * x

    model, _ = instance(random.Random(1), 200, False)
    EXACT.plan(model, Costs(lambda x: 1e-9 * x, exchange), mode)
    assert len(calls) < 10 and 0 not in calls


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [12, 40])
def test_bounds_hold_along_the_optimum(n: int, mode: str) -> None:
    rng = random.Random(5)
    for _ in range(30):
        model, costs = instance(rng, n, True)
        plan = EXACT.plan(model, costs, mode)
        timeline = predict(plan, model, costs, mode)
        edges = run_to_end(edges_of(run_to_end(tables(model, costs, mode))))
        finish = (timeline.finish + 2 * n * edges.grain) * (1 + 1e-9)
        whole, opened = run_to_end(bound(edges, 5, edges.all_open(), None, np.inf))
        behind, left = run_to_end(bound(edges.reversed(), 9, turned(opened), whole, finish))
        ahead, left = run_to_end(bound(edges, 17, turned(left), behind, finish))
        assert whole.remaining[:, 0].max() <= ahead.remaining[:, 0].max() * (1 + 1e-12) <= finish
        path, end = ahead.follow(edges)
        assert sum(last + 1 - first for first, last, _ in path) == n and end >= timeline.finish * (1 - 1e-12)
        for (start, stop), way, span in zip(plan.bounds, plan.dense, timeline.spans, strict=True):
            assert left[start, (way if edges.options > 1 else 0) * n + stop - 1]
            assert len(ahead.in_time(stop, np.array([span.ready]), np.array([span.end]), finish))


def test_what_is_left_out_cannot_end_in_time() -> None:
    """No plan with a merge buffer that the bounds close ends by the finish that they are for."""
    rng, closed = random.Random(7), 0
    for _ in range(20):
        model, costs = instance(rng, 7, False)
        edges = run_to_end(edges_of(run_to_end(tables(model, costs, "behind"))))
        finish = 1.1 * predict(EXACT.plan(model, costs, "behind"), model, costs, "behind").finish
        behind, left = run_to_end(bound(edges.reversed(), 9, turned(edges.all_open()), None, finish))
        ahead, left = run_to_end(bound(edges, 9, turned(left), behind, finish))
        for cuts in itertools.product((False, True), repeat=6):
            stops = [*(i + 1 for i, cut in enumerate(cuts) if cut), 7]
            counts = tuple(np.diff(stops, prepend=0).tolist())
            if not all(left[stop - count, stop - 1] for count, stop in zip(counts, stops, strict=True)):
                closed += 1
                assert predict(Plan(counts), model, costs, "behind").finish > finish
    assert closed > 100


def test_a_problem_from_its_end_is_the_same_problem() -> None:
    rng = random.Random(11)
    for mode in MODES:
        model, costs = instance(rng, 40, True, message=True)
        edges = run_to_end(edges_of(run_to_end(tables(model, costs, mode))))
        back = edges.reversed()
        path, end = run_to_end(bound(edges, 9, edges.all_open(), None, np.inf))[0].follow(edges)
        clock = channel = 0.0
        for first, last, way in reversed(path):
            clock += back.clock[39 - last, way, 39 - first]
            channel = max(channel, clock) + back.channel[39 - last, way, 39 - first]
        assert channel == pytest.approx(end, rel=1e-12)
        assert np.array_equal(turned(turned(edges.all_open())), edges.all_open())


def test_unbeaten_states() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        t, e, b = rng.integers(0, 6, (3, 25))
        kept = {(t[i], e[i], b[i]) for i in unbeaten(t.astype(float), e.astype(float), b)}
        states = set(zip(t, e, b, strict=True))
        beaten = {s for s in states if any(o != s and all(x <= y for x, y in zip(o, s, strict=True)) for o in states)}
        assert kept == states - beaten


def test_six_hundred_tensors_do_not_blow_up(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = []
    monkeypatch.setattr(Work, "spend", lambda self, extensions: spent.append(extensions))
    rng = np.random.default_rng(0)
    sizes = rng.choice([64, 256, 4096, 65536, 1048576], 600)
    model = Profile([f"p{i}" for i in range(600)], sizes, 2e-5 + 1e-10 * sizes)
    for startup in (0.0, 3e-5):
        costs = Costs(lambda x, a=startup: a * (np.asarray(x) > 0) + 2e-10 * x, lambda x: 5e-4 + 1e-10 * x)
        for mode in MODES:
            spent.clear()
            EXACT.plan(model, costs, mode)
            assert 0 < sum(spent) < 1_500_000, (mode, startup)


def test_sums_in_another_order_are_no_other_times() -> None:
    """Without a start-up of selection all clocks agree but for rounding, which must not cost merge buffers."""
    model = planning.profile(planning.stretched("resnet50", 300))
    costs = Costs(lambda x: 2e-10 * x, planning.costs(8, 0.01).exchange)
    plan = EXACT.plan(model, costs, "behind")
    best = predict(plan, model, costs, "behind").finish
    assert len(plan.counts) < 8
    for merged in (Plan((*plan.counts[:-2], sum(plan.counts[-2:]))), Plan((sum(plan.counts[:2]), *plan.counts[2:]))):
        assert predict(merged, model, costs, "behind").finish > best * (1 + 1e-11)
