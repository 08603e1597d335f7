# SPDX-License-Identifier: Apache-2.0
"""Partial sparsification: which size cuts are feasible, what is left for the others, and which cut is taken."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import merging
from merging import Curve, Measurements, Plan, Profile, dense_cutoff, predict

models = st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=12)
densities = st.floats(1e-3, 1.0)


def whole(sizes: list[int], exempt: list[bool], cut: int) -> int:
    return sum(size for size, always in zip(sizes, exempt, strict=True) if always or size <= cut)


@settings(deadline=None)
@given(models, densities)
def test_feasible_cuts_spend_at_most_half_the_budget(model: list[tuple[int, bool]], density: float) -> None:
    sizes, exempt = [list(column) for column in zip(*model, strict=True)]
    found = dense_cutoff.feasible(sizes, exempt, density)
    possible = {0, *(size for size, always in model if not always)}
    assert list(found) == sorted(
        cut for cut in possible if whole(sizes, exempt, cut) <= dense_cutoff.SHARE * density * sum(sizes)
    )
    for cut in found:
        dense, rest = whole(sizes, exempt, cut), dense_cutoff.remaining(sizes, exempt, cut, density)
        assert density / 2 * (1 - 1e-12) <= rest <= density * (1 + 1e-12)
        assert dense + rest * (sum(sizes) - dense) == pytest.approx(density * sum(sizes))


def test_what_is_exempt_counts_in_the_budget() -> None:
    assert dense_cutoff.feasible([40, 2, 958], [True, False, False], 0.1) == (0, 2)
    assert dense_cutoff.feasible([50, 2, 948], [True, False, False], 0.1) == (0,)
    assert dense_cutoff.feasible([51, 2, 947], [True, False, False], 0.1) == ()
    assert dense_cutoff.remaining([40, 2, 958], [True, False, False], 2, 0.1) == (100 - 42) / 958
    with pytest.raises(ValueError, match="sends 100 of 1000 elements uncompressed"):
        dense_cutoff.remaining([100, 900], [True, False], 0, 0.1)
    with pytest.raises(ValueError, match="no cut is feasible"):
        crowded = [51, 949], [True, False], 0.1
        dense_cutoff.choose(merging.get("single"), measured(*crowded, seed=0), *crowded, 0)


def test_the_profile_at_another_cut_has_the_density_once_and_what_is_whole_as_measured() -> None:
    sizes, exempt = [10, 20, 1000, 30], [False, True, False, False]
    before = Profile(list("abcd"), sizes, [1.0] * 4, work=[0, 0, 1000, 0], load=[8, 16, 1, 24])
    after = dense_cutoff.at(before, sizes, exempt, 10, 0.1)
    rest = (0.1 * 1060 - 30) / 1030
    assert after.load.tolist() == [8, 16, math.ceil(rest * 1000), math.ceil(rest * 30)]
    assert after.work.tolist() == [0, 0, 1000, 30]
    assert (after.names, after.backward.tolist()) == (before.names, before.backward.tolist())
    shards = Profile(list("abcd"), [5, 10, 500, 15], [1.0] * 4, work=[0, 0, 500, 0], load=[4, 8, 1, 12])
    of_shards = dense_cutoff.at(shards, sizes, exempt, 10, 0.1).load.tolist()
    assert of_shards == [4, 8, math.ceil(rest * 500), math.ceil(rest * 15)]


def measured(sizes: list[int], exempt: list[bool], density: float, seed: int) -> Measurements:
    """Times and costs by chance, as measured with the largest feasible cut."""
    source = np.random.default_rng(seed)
    most = max(dense_cutoff.feasible(sizes, exempt, density), default=0)
    dense = [always or size <= most for size, always in zip(sizes, exempt, strict=True)]
    load = [max(1, int(size * source.uniform(0.5, 2.0))) for size in sizes]
    work = [0 if is_whole else size for size, is_whole in zip(sizes, dense, strict=True)]
    backward = source.uniform(0, 5, len(sizes))
    profile = Profile([f"t{i}" for i in range(len(sizes))], sizes, backward, work=work, load=load)

    def line(start: float) -> Curve:
        return Curve((0, 1, 1000), (0.0 if start < 0 else start, abs(start), abs(start) + source.uniform(0, 300)))

    modes = (("ahead",), ("behind",), ("behind", "ahead"))[int(source.integers(3))]
    return Measurements(
        profile=profile, sparsify=line(-source.uniform(0, 2)), exchange=line(source.uniform(0, 3)), dense=None,
        modes=modes, workers=2,
    )  # fmt: skip


def partitions(n: int) -> list[Plan]:
    cuts = [chosen for count in range(n) for chosen in combinations(range(1, n), count)]
    return [Plan(tuple(np.diff([0, *chosen, n]).tolist())) for chosen in cuts]


def instance(seed: int) -> tuple[list[int], list[bool], float]:
    source = np.random.default_rng(seed)
    n = int(source.integers(2, 6))
    sizes = [int(size) for size in source.integers(1, 40, n)] + [int(source.integers(200, 500))]
    return sizes, (source.random(n + 1) < 0.2).tolist()[:-1] + [False], float(source.uniform(0.05, 0.6))


@settings(deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_no_other_feasible_cut_ends_sooner(seed: int, exact: bool) -> None:
    """Brute force: every cut, every partition (with ``single``: the paper's one merge buffer), every mode."""
    sizes, exempt, density = instance(seed)
    cuts = dense_cutoff.feasible(sizes, exempt, density)
    if not cuts:
        return
    all_of_it = measured(sizes, exempt, density, seed)
    ends = {}
    for cut in cuts:
        there = dense_cutoff.at(all_of_it.profile, sizes, exempt, cut, density)
        plans = partitions(len(sizes)) if exact else [Plan((len(sizes),))]
        ends[cut] = min(
            predict(plan, there, all_of_it.costs, mode).finish for plan in plans for mode in all_of_it.modes
        )
    planner = merging.get("exact" if exact else "single")
    chosen = dense_cutoff.choose(planner, all_of_it, sizes, exempt, density, cuts[-1])
    assert ends[chosen] == pytest.approx(min(ends.values()), rel=1e-9)
    for most in cuts:
        bounded = dense_cutoff.choose(planner, all_of_it, sizes, exempt, density, most)
        assert bounded <= most


@pytest.mark.parametrize("seed", range(20))
def test_for_one_merge_buffer_ahead_the_cost_is_the_papers(seed: int) -> None:
    """backward + sum of selection over sparsified layers + exchange(F + what the others send), the density once."""
    sizes, exempt, density = [20, 30, 400, 25, 600], [False] * 5, 0.3
    found = replace(measured(sizes, exempt, density, seed), modes=("ahead",))
    costs, profile = found.costs, found.profile

    def by_hand(cut: int) -> float:
        rest = (density * 1075 - whole(sizes, exempt, cut)) / (1075 - whole(sizes, exempt, cut))
        load = sum(profile.load[i] if size <= cut else math.ceil(rest * size) for i, size in enumerate(sizes))
        selection = sum(costs.sparsify(size) for size in sizes if size > cut)
        return float(profile.backward.sum() + selection + costs.exchange(int(load)))

    chosen = dense_cutoff.choose(merging.get("single"), found, sizes, exempt, density, 30)
    assert by_hand(chosen) == pytest.approx(min(by_hand(cut) for cut in (0, 20, 25, 30)))


def test_of_equals_the_largest_and_a_smaller_one_only_for_its_gain() -> None:
    sizes, exempt, density = [20, 30, 1000], [False] * 3, 0.2
    profile = Profile(list("abc"), sizes, [0.0] * 3, work=[0, 0, 1000], load=[40, 60, 160])
    free = Curve((0,), (0.0,))
    found = Measurements(profile=profile, sparsify=free, exchange=free, dense=None, modes=("ahead",), workers=2)
    planner = merging.get("single")
    assert dense_cutoff.choose(planner, found, sizes, exempt, density, 30) == 30
    dear = replace(found, exchange=Curve((0, 1000), (0.0, 1000.0)))  # whole, an element costs twice as much
    # 210 elements for cut 0, 230 for 20, 260 for 30, by the ceil of each tensor one or two more.
    ends = {cut: int(dense_cutoff.at(profile, sizes, exempt, cut, density).load.sum()) for cut in (0, 20, 30)}
    assert ends[0] < ends[20] < ends[30]
    assert dense_cutoff.choose(planner, dear, sizes, exempt, density, 30) == 0
    worth = ends[30] / ends[0] - 1
    assert dense_cutoff.choose(planner, dear, sizes, exempt, density, 30, gain=worth * 0.99) == 0
    assert dense_cutoff.choose(planner, dear, sizes, exempt, density, 30, gain=worth * 1.01) == 30


def test_of_many_cuts_a_few_are_planned_for_both_ends_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [*range(1, 101), 10**6]
    exempt = [False] * len(sizes)
    profile = Profile([f"t{i}" for i in range(101)], sizes, [0.0] * 101)
    line = Curve((0, 10**6), (0.0, 1.0))
    found = Measurements(profile=profile, sparsify=line, exchange=line, dense=None, modes=("ahead",), workers=2)
    seen: list[int] = []
    original = dense_cutoff.at

    def at(profile: Profile, sizes: list[int], exempt: list[bool], cut: int, density: float) -> Profile:
        seen.append(cut)
        return original(profile, sizes, exempt, cut, density)

    monkeypatch.setattr(dense_cutoff, "at", at)
    dense_cutoff.choose(merging.get("single"), found, sizes, exempt, 0.1, 100)
    assert len(seen) == dense_cutoff.MOST and {0, 100} <= set(seen)
