# SPDX-License-Identifier: Apache-2.0
"""Merge buffers in several messages: predicted as on paper, and divided only where that gains."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planning_problems import plans_and_profiles

import merging
from merging import Costs, Plan, Profile, divide, predict
from merging.timeline import GAIN, SMALLEST, cut

QUICK = settings(deadline=None)


def costs(start: float = 0.7, dense: bool = True) -> Costs:
    return Costs(
        lambda x: 0.003 * x + 1e-9 * x * x,
        lambda x: start + 0.011 * x,
        (lambda x: 0.9 + 0.002 * x) if dense else None,
    )


def twin(plan: Plan, profile: Profile, costs: Costs, mode: str) -> list[tuple[float, float, float]]:
    """The recursion as it is written on paper, one addition after the other."""
    t = free = 0.0
    tensor, spans = 0, []
    for count, dense, parts in zip(plan.counts, plan.dense, plan.parts, strict=True):
        inside = range(tensor, tensor + count)
        work, load, numel = (sum(int(of[i]) for i in inside) for of in (profile.work, profile.load, profile.numel))
        if work == 0:
            parts = 1
        for i in inside:
            t += float(profile.backward[i])
            if mode == "ahead" and not dense and parts == 1:
                t += costs.sparsify(int(profile.work[i]))
        leaves = []
        for _ in range(parts):
            if not dense and (mode == "behind" or parts > 1):
                t += costs.sparsify(-(-work // parts))
            leaves.append((t, max(free, t)))
            assert costs.dense is not None
            free = leaves[-1][1] + (costs.dense(numel) if dense else costs.exchange(-(-load // parts)))
        spans.append((*leaves[0], free))
        tensor += count
    return spans


@st.composite
def cases(draw: st.DrawFn, mode: str, most: int = 1000) -> tuple[Plan, Profile]:
    plan, profile = draw(plans_and_profiles(most, st.just(0) | st.integers(0, most)))
    drawn = draw(st.lists(st.integers(1, 5), min_size=len(plan.counts), max_size=len(plan.counts)))
    whole = [dense or (mode == "ahead" and count > 1) for dense, count in zip(plan.dense, plan.counts, strict=True)]
    parts = tuple(1 if one else number for one, number in zip(whole, drawn, strict=True))
    return replace(plan, parts=parts), profile


@QUICK
@given(st.data(), st.sampled_from(["ahead", "behind"]))
def test_agrees_with_the_twin(data: st.DataObject, mode: str) -> None:
    plan, profile = data.draw(cases(mode))
    timeline = predict(plan, profile, costs(), mode)
    expected = twin(plan, profile, costs(), mode)
    assert [tuple(span) for span in timeline.spans] == [pytest.approx(span, rel=1e-12) for span in expected]


def test_by_hand() -> None:
    """Two merge buffers of 2 and 60 elements of work; the second in three parts of 20, which take 4 to send."""
    profile = Profile(["a", "b", "c"], [1, 1, 60], [1.0, 1.0, 1.0], work=[1, 1, 60], load=[1, 1, 9])
    wire = Costs(lambda x: 0.5 * x, lambda x: 1.0 + x)
    assert predict(Plan((2, 1)), profile, wire, "behind").spans == ((3, 3, 6), (34, 34, 44))
    assert predict(Plan((2, 1), parts=(1, 3)), profile, wire, "behind").spans == ((3, 3, 6), (14, 14, 38))
    assert predict(Plan((2, 1), parts=(1, 3)), profile, wire, "ahead").spans == ((3, 3, 6), (14, 14, 38))
    fast = Costs(lambda x: 0.0 * x, lambda x: 1.0 + x)  # nothing to hide: two more starts
    assert predict(Plan((2, 1), parts=(1, 3)), profile, fast, "behind").finish == 5 + 3 * (1 + 3)


@QUICK
@given(st.data(), st.sampled_from(["dense", "dear"]))
def test_where_nothing_is_selected_parts_are_not_read(data: st.DataObject, mode: str) -> None:
    plan, profile = data.draw(cases("behind"))
    profile = Profile(**{**profile.plain(), "forward": profile.backward})
    assert predict(plan, profile, costs(), mode) == predict(replace(plan, parts=()), profile, costs(), mode)


def test_several_tensors_ahead_are_refused() -> None:
    profile = Profile(["a", "b", "c"], [1, 1, 60], [1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="merge buffer 1 has 3 parts, but must have 1, .* 2 tensors"):
        predict(Plan((1, 2), parts=(2, 3)), profile, costs(), "ahead")


# -- plans ------------------------------------------------------------------------------------------------------


def test_parts_are_part_of_a_plan_and_left_out_where_all_are_1() -> None:
    plan = Plan((2, 1), parts=(1, 4))
    assert Plan.loads(plan.dumps()) == plan != Plan((2, 1)) and plan.digest() != Plan((2, 1)).digest()
    assert Plan((2, 1), parts=(1, 1)).dumps() == Plan((2, 1)).dumps() and "parts" not in Plan((2, 1)).dumps()
    assert json.loads(plan.dumps())["parts"] == [1, 4] and Plan.loads(Plan((2, 1)).dumps()).parts == (1, 1)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"parts": (1,)}, ValueError, "parts has 1 entries.*Pass 2"),
        ({"parts": (1, 0)}, ValueError, r"parts\[1\] is 0.*at least 1"),
        ({"parts": (1, 2.0)}, TypeError, r"parts\[1\] is 2.0"),
        ({"dense": (False, True), "parts": (1, 2)}, ValueError, "merge buffer 1 is dense and has 2 parts"),
    ],
)
def test_refuses(arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        Plan((2, 1), **arguments)


def test_cut_keeps_parts() -> None:
    profile = Profile(["a", "b", "c"], [2**30, 2**30, 1], [0.0] * 3)
    assert cut(Plan((2, 1), parts=(4, 2)), profile).parts == (4, 4, 2)


# -- divide -----------------------------------------------------------------------------------------------------


@QUICK
@given(st.data(), st.sampled_from(["ahead", "behind"]), st.integers(1, 9), st.sampled_from([0.001, 1.0, 100.0]))
def test_division_gains_or_leaves_alone(data: st.DataObject, mode: str, most: int, start: float) -> None:
    plan, profile = data.draw(cases(mode, most=4 * SMALLEST))
    found = divide(plan, profile, costs(start), mode, most)
    assert found == divide(found, profile, costs(start), mode, most)  # what there was plays no part
    assert replace(found, parts=()) == replace(plan, parts=())
    before = predict(replace(plan, parts=()), profile, costs(start), mode).finish
    after = predict(found, profile, costs(start), mode).finish
    several = [part for part in found.parts if part > 1]
    assert after <= before * (1 - GAIN) ** len(several) and (after < before or not several)
    for (first, stop), part in zip(found.bounds, found.parts, strict=True):
        assert part <= most and part & (part - 1) == 0
        assert part == 1 or part * SMALLEST <= profile.work[first:stop].sum()


def typical(selection: float, start: float = 1e-3, wire: float = 1e-6) -> tuple[Profile, Costs]:
    """A tied embedding, ready last: 16 of 17 million elements, 1 % of which travel. Seconds an element."""
    million = 2**20
    numel = [million // 4] * 4 + [16 * million]
    profile = Profile([f"p{i}" for i in range(5)], numel, [0.01] * 5, load=[n // 100 for n in numel])
    return profile, Costs(lambda x: selection * x, lambda x: start + wire * x)


@pytest.mark.parametrize("mode", ["ahead", "behind"])
def test_the_last_large_tensor_is_divided_until_starts_cost_more_than_they_hide(mode: str) -> None:
    profile, wire = typical(10e-9)  # both take 0.17 s
    plan = Plan((4, 1))
    assert divide(plan, profile, wire, mode).parts == (1, 8)
    assert divide(plan, profile, wire, mode, most=5).parts == (1, 4)
    assert divide(plan, profile, wire, mode, most=1).parts == (1, 1)
    whole, parts = (predict(one, profile, wire, mode).finish for one in (plan, replace(plan, parts=(1, 8))))
    assert whole - parts == pytest.approx(7 / 8 * 0.1678 - 7e-3, rel=1e-2)
    assert divide(plan, *typical(10e-9, start=0.06), mode).parts == (1, 2)
    assert divide(plan, *typical(10e-9, start=0.2), mode).parts == (1, 1)
    assert divide(plan, *typical(0.1e-9), mode).parts == (1, 1)  # nothing to hide


def test_what_cannot_travel_in_parts_is_left() -> None:
    profile, wire = typical(10e-9)
    assert divide(Plan((4, 1), parts=(3, 3)), profile, wire, "dense") == Plan((4, 1))
    assert divide(Plan((3, 2)), profile, wire, "ahead").parts == (1, 1)
    assert divide(Plan((3, 2)), profile, wire, "behind").parts == (1, 8)
    dear = replace(wire)
    object.__setattr__(dear, "dense", Costs(wire.sparsify, wire.exchange, lambda x: 1e-8 * x).dense)
    assert divide(Plan((4, 1), (False, True)), profile, dear, "behind").parts == (1, 1)
    with pytest.raises(ValueError, match="is supported by the planner"):
        divide(Plan((4, 1)), profile, wire, "dear")
    with pytest.raises(ValueError, match="divide: most is 0"):
        divide(Plan((4, 1)), profile, wire, "behind", most=0)


def test_a_division_costs_few_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return predict(*arguments)

    monkeypatch.setattr("merging.timeline.predict", counted)
    profile, wire = typical(10e-9)
    divide(Plan((1,) * 5), profile, wire, "behind")
    assert len(calls) == 1 + 3  # the other four are too small to divide


@pytest.mark.parametrize("name", merging.names())
def test_planners_do_not_divide(name: str) -> None:
    profile, wire = typical(10e-9)
    planner = merging.get(name)
    mode = "behind" if "behind" in planner.modes else planner.modes[0]
    profile = Profile(**{**profile.plain(), "forward": profile.backward, "noise": [1.0] * 5})
    assert set(planner.plan(profile, wire, mode).parts) == {1}
