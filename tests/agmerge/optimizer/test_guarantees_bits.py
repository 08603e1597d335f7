# SPDX-License-Identifier: Apache-2.0
"""G12 and G13: density 1 is dense training, and the same seeds and plan give the same bits."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import pytest
import torch
from support import agreed, mlp, on_ranks, random_plan, seeded, sgd, train, trained, wrap
from torch import nn

import merging
from agmerge import testing

MODEL = seeded(mlp)
PLANS = ["single", "layerwise", "threshold", random_plan(1, 6), random_plan(2, 6)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_g12_density_one_is_none_to_the_bit_with_any_plan(size: int, dtype: torch.dtype) -> None:
    model, inner = copy.deepcopy(MODEL).to(dtype), functools.partial(sgd, weight_decay=0.01)
    none = trained(size, model, 6, inner, compression="none")
    assert len(set(none)) == 6
    for plan in PLANS:
        for options in ({"compression": "none"}, {"density": 1.0}, {"density": 1.0, "dense": []}):
            assert trained(size, model, 6, inner, merging=plan, **options) == none, (plan, options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_g12_density_one_of_sixteen_bits_is_none_with_ordered_sums(size: int, dtype: torch.dtype) -> None:
    """Both add in float32 and round once. A native sum of sixteen bits rounds at every addition."""
    model, inner = copy.deepcopy(MODEL).to(dtype), functools.partial(sgd, lr=0.05)
    none = trained(size, model, 6, inner, compression="none", dense_sum="ordered")
    assert trained(size, model, 6, inner, density=1.0) == none
    assert len(set(none)) == 6


@pytest.mark.parametrize("compression", ["none", "eden", "fp16", "bf16", "powersgd", "acpsgd"])
def test_g12_an_ordered_sum_does_not_depend_on_the_plan(compression: str) -> None:
    runs = [trained(3, MODEL, 6, compression=compression, merging=plan, dense_sum="ordered") for plan in PLANS]
    assert all(run == runs[0] for run in runs) and len(set(runs[0])) == 6


@pytest.mark.parametrize("compression", ["none", "topk", "eden", "fp16", "powersgd", "acpsgd"])
@pytest.mark.parametrize("size", [2, 3])
def test_g13_the_same_run_has_the_same_bits_at_any_speed(size: int, compression: str) -> None:
    options = {"compression": compression, "merging": "layerwise"}
    runs = [trained(size, MODEL, 6, inject=testing.jitter(seed), **options) for seed in range(3)]
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("by", ["path", "string", "plan"])
def test_g13_a_saved_plan_reproduces_the_run_that_made_it(by: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"

    def first(rank: int, model: nn.Module) -> tuple[list[str], merging.Plan]:
        optimizer = wrap(model, merging=merging.get("threshold", bytes=4096))
        seen = train(model, optimizer, rank, range(6))
        if rank == 0:
            optimizer.plan.save(path)
        return seen, optimizer.plan

    seen, plan = agreed(on_ranks(3, MODEL, first))
    given = {"path": path, "string": str(path), "plan": merging.Plan.load(path)}[by]

    def again(rank: int, model: nn.Module) -> tuple[list[str], merging.Plan]:
        optimizer = wrap(model, merging=given)
        return train(model, optimizer, rank, range(6)), optimizer.plan

    assert agreed(on_ranks(3, MODEL, again)) == (seen, plan)
    assert trained(3, MODEL, 6, merging="single") != seen  # so the plan does matter
