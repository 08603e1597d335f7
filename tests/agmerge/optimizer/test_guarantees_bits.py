"""G12 and G13: density 1 is dense training, and the same seeds and plan give the same bits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support import (
    agreed,
    mlp,
    on_ranks,
    random_plan,
    seeded,
    sgd,
    train,
    wrap,
)
from torch import nn

import merging
from agmerge import testing

MODEL = seeded(mlp)
PLANS = ["single", "layerwise", "threshold", random_plan(1, 6), random_plan(2, 6)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_g12_density_one_is_none_to_the_bit_with_any_plan(size: int, dtype: torch.dtype) -> None:
    def body(rank: int, model: nn.Module, **options: Any) -> list[str]:
        return train(model, wrap(model, sgd(model, weight_decay=0.01), **options), rank, range(6))

    model = copy.deepcopy(MODEL).to(dtype)
    none = agreed(on_ranks(size, model, lambda r, m: body(r, m, compression="none")))
    assert len(set(none)) == 6
    for plan in PLANS:
        for options in ({"compression": "none"}, {"density": 1.0}, {"density": 1.0, "dense": []}):
            found = agreed(on_ranks(size, model, lambda r, m, o=options, p=plan: body(r, m, merging=p, **o)))
            assert found == none, (plan, options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_g12_density_one_of_sixteen_bits_is_none_with_ordered_sums(size: int, dtype: torch.dtype) -> None:
    """Both add in float32 and round once. A native sum of sixteen bits rounds at every addition."""

    def body(rank: int, model: nn.Module, **options: Any) -> list[str]:
        return train(model, wrap(model, sgd(model, lr=0.05), **options), rank, range(6))

    model = copy.deepcopy(MODEL).to(dtype)
    none = agreed(on_ranks(size, model, lambda r, m: body(r, m, compression="none", dense_sum="ordered")))
    assert agreed(on_ranks(size, model, lambda r, m: body(r, m, density=1.0))) == none
    assert len(set(none)) == 6


@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
def test_g12_an_ordered_sum_does_not_depend_on_the_plan(compression: str) -> None:
    def body(rank: int, model: nn.Module, plan: Any) -> list[str]:
        optimizer = wrap(model, compression=compression, merging=plan, dense_sum="ordered")
        return train(model, optimizer, rank, range(6))

    found = [agreed(on_ranks(3, MODEL, lambda r, m, p=plan: body(r, m, p))) for plan in PLANS]
    assert all(seen == found[0] for seen in found) and len(set(found[0])) == 6


@pytest.mark.parametrize("compression", ["none", "topk", "fp16"])
@pytest.mark.parametrize("size", [2, 3])
def test_g13_the_same_run_has_the_same_bits_at_any_speed(size: int, compression: str) -> None:
    def body(rank: int, model: nn.Module) -> list[str]:
        return train(model, wrap(model, compression=compression, merging="layerwise"), rank, range(6))

    found = [agreed(on_ranks(size, MODEL, body, inject=testing.jitter(seed))) for seed in range(3)]
    assert found[0] == found[1] == found[2]


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
    other = agreed(on_ranks(3, MODEL, lambda r, m: train(m, wrap(m, merging="single"), r, range(6))))
    assert other != seen  # so the plan does matter
