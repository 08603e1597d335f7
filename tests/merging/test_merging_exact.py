"""`exact` against every partition, and against every other planner."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import merging
from merging import Costs, Plan, Profile


def instance(seed: int, n: int, dense: bool) -> tuple[Profile, Costs]:
    """A random model: some tensors exempt, ready in bursts, costs with a start-up and a bend."""
    draw = np.random.default_rng(seed)
    numel = draw.integers(1, 1000, n)
    work = np.where(draw.random(n) < 0.3, 0, numel)
    backward = np.where(draw.random(n) < 0.2, 0.0, draw.random(n))
    start, slope, bend = draw.random() * 2, draw.random() * 4e-3, draw.random() * 500
    encode = draw.random() * 2e-3

    def line(start: float, slope: float, bend: float) -> merging.Cost:
        return lambda elements: start + slope * np.minimum(elements, bend) + 2 * slope * np.maximum(elements - bend, 0)

    costs = Costs(
        sparsify=lambda elements: encode * np.asarray(elements, dtype=float),
        exchange=line(start, slope, bend),
        dense=line(0.3 * start, 1.5 * slope, bend) if dense else None,
    )
    return Profile([f"t{i}" for i in range(n)], numel, backward, work=work), costs


def partitions(n: int) -> list[tuple[int, ...]]:
    """Every way to cut n tensors into runs."""
    found = []
    for cuts in itertools.product((False, True), repeat=n - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), n]
        found.append(tuple(b - a for a, b in zip(edges, edges[1:], strict=False)))
    return found


def best(profile: Profile, costs: Costs, mode: str) -> float:
    """The smallest predicted finish of all plans."""
    finish = float("inf")
    for counts in partitions(len(profile)):
        flags = itertools.product((False, True), repeat=len(counts)) if costs.dense else [(False,) * len(counts)]
        for dense in flags:
            finish = min(finish, merging.predict(Plan(counts, dense), profile, costs, mode).finish)
    return finish


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("mode", merging.MODES)
def test_no_partition_ends_earlier(mode: str, dense: bool) -> None:
    for seed in range(25):
        profile, costs = instance(seed, 1 + seed % (6 if dense else 8), dense)
        found = merging.predict(merging.get("exact").plan(profile, costs, mode), profile, costs, mode).finish
        assert found == pytest.approx(best(profile, costs, mode), rel=1e-9), (seed, mode)


@pytest.mark.parametrize("mode", merging.MODES)
def test_no_other_planner_ends_earlier(mode: str) -> None:
    for seed in range(8):
        profile, costs = instance(seed, 20, dense=False)
        finish = merging.predict(merging.get("exact").plan(profile, costs, mode), profile, costs, mode).finish
        for name in merging.names():
            other = merging.get(name, **({"tensors": 3} if name == "count" else {}))
            plan = other.plan(profile, costs, mode)
            assert finish <= merging.predict(plan, profile, costs, mode).finish * (1 + 1e-9), (name, seed)
