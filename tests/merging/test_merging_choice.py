# SPDX-License-Identifier: Apache-2.0
"""choose_dense: the best flags for a given partition."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import merging
from merging.timeline import choose_dense

MODES = ("dense", "ahead", "behind")


def instance(seed: int, tensors: int) -> tuple[merging.Plan, merging.Profile, merging.Costs]:
    """A random profile, partition and costs, near the point where dense and sparse cost the same."""
    source = np.random.default_rng(seed)
    numel = source.integers(1, 50, tensors)
    work = np.where(source.random(tensors) < 0.2, 0, numel)
    names = [f"t{i}" for i in range(tensors)]
    load = np.maximum(1, numel // int(source.integers(1, 6)))
    profile = merging.Profile(names, numel, source.integers(0, 30, tensors) / 2, work=work, load=load)
    starts, slopes = source.integers(0, 12, 3), source.random(3)
    costs = merging.Costs(
        lambda x: np.where(np.asarray(x) > 0, starts[0] + slopes[0] * np.asarray(x), 0.0),
        lambda x: starts[1] + slopes[1] * np.asarray(x),
        lambda x: starts[2] + slopes[2] * np.asarray(x),
    )
    cuts = sorted(source.choice(np.arange(1, tensors), int(source.integers(0, tensors)), replace=False).tolist())
    counts = [b - a for a, b in zip([0, *cuts], [*cuts, tensors], strict=True)]
    return merging.Plan(tuple(counts)), profile, costs


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 9), st.sampled_from(MODES))
def test_no_other_flags_end_sooner(seed: int, tensors: int, mode: str) -> None:
    plan, profile, costs = instance(seed, tensors)
    chosen = choose_dense(plan, profile, costs, mode)
    assert chosen.counts == plan.counts

    def finish(flags: tuple[bool, ...]) -> float:
        return merging.predict(merging.Plan(plan.counts, flags), profile, costs, mode).finish

    best = min(finish(flags) for flags in product((False, True), repeat=len(plan.counts)))
    assert finish(chosen.dense) == pytest.approx(best, rel=1e-12)


def test_both_are_chosen_where_both_pay() -> None:
    profile = merging.Profile(["a", "b"], [10, 1000], [0.0, 0.0], load=[10, 10])
    costs = merging.Costs(lambda x: 0.0 * x, lambda x: 2.0 * x, lambda x: 1.0 * x)
    assert choose_dense(merging.Plan((1, 1)), profile, costs, "behind").dense == (True, False)


def test_without_a_dense_cost_nothing_goes_dense() -> None:
    profile = merging.Profile(["a", "b"], [10, 1000], [0.0, 0.0])
    costs = merging.Costs(lambda x: 0.0 * x, lambda x: 2.0 * x)
    assert choose_dense(merging.Plan((1, 1), (True, False)), profile, costs, "behind").dense == (False, False)


def test_of_equals_the_fewest_go_dense() -> None:
    profile = merging.Profile(["a", "b"], [10, 10], [0.0, 0.0])
    costs = merging.Costs(lambda x: 0.0 * x, lambda x: 2.0 * x, lambda x: 2.0 * x)
    assert choose_dense(merging.Plan((1, 1)), profile, costs, "ahead").dense == (False, False)


@pytest.mark.slow
def test_many_merge_buffers_are_no_matter() -> None:
    plan, profile, costs = instance(3, 600)
    plan = merging.Plan((1,) * 600)
    chosen = choose_dense(plan, profile, costs, "behind")
    ends = [
        merging.predict(merging.Plan(plan.counts, (flag,) * 600), profile, costs, "behind").finish
        for flag in (False, True)
    ]
    assert merging.predict(chosen, profile, costs, "behind").finish <= min(ends) * (1 + 1e-12)


def test_wrong_input_is_refused() -> None:
    plan, profile, costs = instance(1, 4)
    with pytest.raises(ValueError, match="mode 'sideways' is unknown"):
        choose_dense(plan, profile, costs, "sideways")
    with pytest.raises(ValueError, match="covers 9 tensors"):
        choose_dense(merging.Plan((9,)), profile, costs, "behind")
