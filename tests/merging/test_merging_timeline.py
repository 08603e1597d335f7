# SPDX-License-Identifier: Apache-2.0
"""predict: by hand, and against a twin that walks tensor by tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planning_problems import plans_and_profiles

from merging import MODES, Costs, Plan, Profile, predict

QUICK = settings(deadline=None)


def costs(dense: bool = True) -> Costs:
    return Costs(
        lambda elements: 0.003 * elements,
        lambda elements: 0.7 + 0.011 * elements,
        (lambda elements: 0.9 + 0.002 * elements) if dense else None,
    )


def twin(plan: Plan, profile: Profile, costs: Any, mode: str) -> list[tuple[float, float, float]]:
    """The recursion as it is written on paper, one addition after the other."""
    t = free = 0.0
    tensor, spans = 0, []
    for count, dense in zip(plan.counts, plan.dense, strict=True):
        work = load = numel = 0
        for i in range(tensor, tensor + count):
            t += float(profile.backward[i])
            if mode == "ahead" and not dense:
                t += 0.003 * int(profile.work[i])
            work, load, numel = work + profile.work[i], load + profile.load[i], numel + profile.numel[i]
        if mode == "behind" and not dense:
            t += 0.003 * work
        start = free if free > t else t
        free = start + (0.9 + 0.002 * numel if dense else 0.7 + 0.011 * load)
        spans.append((t, start, free))
        tensor += count
    return spans


@QUICK
@given(plans_and_profiles(), st.sampled_from(MODES))
def test_agrees_with_the_twin(case: tuple[Plan, Profile], mode: str) -> None:
    timeline = predict(*case, costs(), mode)
    expected = twin(*case, costs(), mode)
    assert [tuple(span) for span in timeline.spans] == [pytest.approx(span, rel=1e-12) for span in expected]
    assert timeline.finish == timeline.spans[-1].end


@QUICK
@given(plans_and_profiles())
def test_readiness_does_not_depend_on_merging_to_the_bit(case: tuple[Plan, Profile]) -> None:
    plan, profile = case
    plan = Plan(plan.counts)
    for mode in ("dense", "ahead"):
        alone = predict(Plan((1,) * len(profile)), profile, costs(), mode)
        merged = predict(plan, profile, costs(), mode)
        assert [span.ready for span in merged.spans] == [alone.spans[stop - 1].ready for _, stop in plan.bounds]


HAND = Profile(["a", "b", "c"], [10, 20, 30], [1.0, 2.0, 4.0], work=[10, 0, 30], load=[1, 2, 3])


@pytest.mark.parametrize(
    ("mode", "plan", "spans"),
    [
        ("dense", Plan((1, 1, 1)), [(1, 1, 12), (3, 12, 24), (7, 24, 37)]),
        ("dense", Plan((2, 1)), [(3, 3, 16), (7, 16, 29)]),
        ("dense", Plan((2, 1), (True, False)), [(3, 3, 133), (7, 133, 146)]),
        ("ahead", Plan((2, 1)), [(23, 23, 36), (87, 87, 100)]),
        ("ahead", Plan((2, 1), (True, False)), [(3, 3, 133), (67, 133, 146)]),
        ("behind", Plan((2, 1)), [(103, 103, 116), (1007, 1007, 1020)]),
        ("behind", Plan((3,)), [(1607, 1607, 1623)]),
        ("behind", Plan((2, 1), (False, True)), [(103, 103, 116), (107, 116, 246)]),
    ],
)
def test_by_hand(mode: str, plan: Plan, spans: list[tuple[float, float, float]]) -> None:
    """Selection takes 2 s an element ahead and x*x seconds behind, so that merging shows in the cost."""
    sparsify = (lambda x: 2.0 * x) if mode == "ahead" else (lambda x: 1.0 * x * x)
    timeline = predict(plan, HAND, Costs(sparsify, lambda x: 10.0 + x, lambda x: 100.0 + x), mode)
    assert [tuple(span) for span in timeline.spans] == spans
    assert timeline.finish == spans[-1][2]


def test_dear_by_hand() -> None:
    """Half an exchange each way; the gathers go in the order of forward, from the end of the plan."""
    profile = Profile(
        ["a", "b", "c"], [10, 20, 30], [1.0, 2.0, 4.0], forward=[100.0, 3.0, 1.0], work=[9, 9, 9], load=[2, 4, 6]
    )
    wire = Costs(lambda x: 99.0 * x, lambda x: 10.0 + x, lambda x: 20.0 + 2 * x)
    timeline = predict(Plan((1, 1, 1)), profile, wire, "dear")
    assert timeline.spans == ((1, 1, 7), (3, 7, 14), (7, 14, 22))
    assert timeline.gathers == ((22, 37, 43), (22, 30, 37), (22, 22, 30)) and timeline.finish == 143
    timeline = predict(Plan((2, 1)), profile, wire, "dear")
    assert timeline.spans == ((3, 3, 11), (7, 11, 19)) and timeline.gathers == ((19, 27, 35), (19, 19, 27))
    assert timeline.finish == 138
    assert predict(Plan((3,)), profile, wire, "dear").finish == 7 + 22 + 104
    assert predict(Plan((3,), (True,)), profile, wire, "dear").finish == 7 + 140 + 104
    slow = Profile(["a", "b"], [1, 1], [0.0, 0.0], forward=[1.0, 50.0])
    assert predict(Plan((1, 1)), slow, wire, "dear").finish == 11 + 5.5 + 51  # the second gather is hidden
    assert predict(Plan((1, 1)), slow, wire, "dense").gathers == () and MODES == ("dense", "ahead", "behind")


def test_known_vectors() -> None:
    """The MG-WFBP and OMGS-SGD counter-examples: the greedy's plan and the optimum."""
    profile = Profile(["a", "b", "c"], [5, 1, 1], [0.0, 5.0, 6.0])
    wire = Costs(lambda x: 0.0 * x, lambda x: 6.0 + x)
    assert predict(Plan((2, 1)), profile, wire, "dense").finish == 24
    assert predict(Plan((1, 2)), profile, wire, "dense").finish == 19
    profile = Profile(["a", "b", "c"], [4, 4, 8], [3.0, 3.0, 0.0])
    slow = Costs(lambda x: x * np.log2(np.maximum(x, 1)), lambda x: 2.0 * (4 + x))
    assert predict(Plan((3,)), profile, slow, "behind").finish == 110
    assert predict(Plan((1, 1, 1)), profile, slow, "behind").finish == 70


def test_refuses() -> None:
    with pytest.raises(ValueError, match="forward, because it hides all-gathers behind"):
        predict(Plan((3,)), HAND, costs(), "dear")
    with pytest.raises(ValueError, match="mode 'sideways' is unknown. Use one of dense, ahead, behind, dear"):
        predict(Plan((3,)), HAND, costs(), "sideways")
    with pytest.raises(ValueError, match="covers 2 tensors, but the model has 3"):
        predict(Plan((2,)), HAND, costs(), "dense")
    with pytest.raises(ValueError, match="tensor 2 in readiness order is 'x'"):
        predict(Plan((3,), names=("a", "b", "x")), HAND, costs(), "dense")
    with pytest.raises(ValueError, match="merge buffer 1 is dense.*costs.dense is None"):
        predict(Plan((2, 1), (False, True)), HAND, costs(dense=False), "dense")
    predict(Plan((3,)), HAND, costs(dense=False), "dense")
