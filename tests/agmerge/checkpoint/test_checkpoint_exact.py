# SPDX-License-Identifier: Apache-2.0
"""Eighteen steps, against twelve, a restart and six: the same bits on every rank, whatever compresses and keeps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import Parts, agreed, digest, loss_of, mlp, on_ranks, residuals, seeded, sgd, through_a_file, wrap
from torch import nn

import agmerge
import merging
import sparsifiers

MODEL = seeded(mlp)
NAMES = tuple(name for name in sparsifiers.names())
DGC = sparsifiers.memory("dgc", momentum=0.9)
SMALL = merging.get("threshold", bytes=4096)
CELLS: dict[str, dict[str, Any]] = {
    **{name: {"compression": name, "memory": "residual"} for name in NAMES},
    **{f"{name}, no memory": {"compression": name, "memory": "none"} for name in ("topk", "adtopk", "randomk")},
    **{f"{name}, residualgtopk": {"compression": name, "memory": "residualgtopk"} for name in ("topk", "adtopk")},
    **{f"{name}, dgc": {"compression": name, "memory": DGC} for name in ("dgc", "adtopk", "redsync")},
    "dgc, nesterov": {"compression": "dgc", "memory": sparsifiers.memory("dgc", momentum=0.8, nesterov=True)},
    **{one: {"compression": one} for one in ("none", "fp16", "bf16")},
    **{name: {"compression": name} for name in sparsifiers.low_rank_names()},
    **{f"{name}, no memory": {"compression": name, "memory": "none"} for name in sparsifiers.low_rank_names()},
    "hybrid": {"compression": {"0.weight": "topk", ".*": "acpsgd"}, "rank": {".*": 2}},
    "oktopk": {"compression": "topk", "exchange": "oktopk"},
    "masked": {"compression": "topk", "exchange": "masked"},
    "ahead": {"compression": "adtopk", "sparsify": "ahead"},
    **{wire: {"compression": "topk", "wire": wire} for wire in ("int8", "int4", "2bit", "sign")},
    "warm-up": {"compression": "topk", "warmup": 30},
    "importance": {"compression": "topk", "density": "importance"},
    "by pattern": {"compression": "topk", "density": {"0.weight": 0.1}},
    "accumulation": {"compression": "topk", "backward_passes_per_step": 2},
    "accumulation, dgc": {"compression": "dgc", "memory": DGC, "backward_passes_per_step": 2},
    "accumulation, acpsgd": {"compression": "acpsgd", "backward_passes_per_step": 2},
    "accumulation, dense": {"compression": "none", "backward_passes_per_step": 2},
}
STEPS, HALF = 18, 12  # after ten steps budgets and plans are chosen anew


def optimizers(inner: str, model: nn.Module, options: dict[str, Any]) -> torch.optim.Optimizer:
    if inner == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    memory = options.get("memory")
    corrects = isinstance(memory, sparsifiers.Memory) and memory.has_momentum
    return sgd(model, lr=0.05, momentum=0.0 if corrects else 0.9, weight_decay=0.1)


def go(model: nn.Module, optimizer: Any, rank: int, passes: range, every: int) -> list[str]:
    """Backward passes, a step after every ``every`` of them; the model's digest after each pass."""
    seen = []
    for one in passes:
        if one % every == 0:
            optimizer.zero_grad()
        loss_of(model, rank, one).backward()
        if (one + 1) % every == 0:
            optimizer.step()
        seen.append(digest(model))
    return seen


@pytest.mark.parametrize("inner", ["sgd", "adamw"])
@pytest.mark.parametrize("cell", CELLS)
def test_a_restart_changes_no_bit(cell: str, inner: str) -> None:
    """Also in the middle of an accumulation, where the gradients so far belong to the checkpoint."""
    options = {"merging": SMALL, "density": 0.05, **CELLS[cell]}
    if inner == "adamw" and isinstance(options.get("memory"), sparsifiers.Memory):
        options["memory"] = "residual"
    every = options.get("backward_passes_per_step", 1)
    half = HALF + every - 1

    def started(model: nn.Module) -> Any:
        return wrap(model, optimizers(inner, model, options), **options)

    def whole(rank: int, model: nn.Module) -> Any:
        optimizer = started(model)
        seen = go(model, optimizer, rank, range(half), every)
        saved = through_a_file((model.state_dict(), optimizer.state_dict()))
        return saved, seen + go(model, optimizer, rank, range(half, STEPS), every)

    found = on_ranks(2, MODEL, whole)

    def second(rank: int, model: nn.Module) -> list[str]:
        optimizer = started(model)
        model.load_state_dict(found[rank][0][0])
        optimizer.load_state_dict(found[rank][0][1])
        return go(model, optimizer, rank, range(half, STEPS), every)

    agreed([seen for _, seen in found])
    assert agreed(on_ranks(2, MODEL, second)) == found[0][1][half:]
    assert len(set(found[0][1])) == STEPS // every + (every > 1)


def test_between_the_last_backward_and_its_step() -> None:
    """Messages are under way: the step is made again, from the gradients as this rank had them."""

    def body(rank: int, model: nn.Module, restart: bool) -> str:
        optimizer = wrap(model, compression="adtopk", merging=SMALL)
        go(model, optimizer, rank, range(4), 1)
        optimizer.zero_grad()
        loss_of(model, rank, 4).backward()
        if restart:
            state = through_a_file(optimizer.state_dict())
            model = copy.deepcopy(model)
            model.zero_grad()
            optimizer = wrap(model, compression="adtopk", merging=SMALL)
            optimizer.load_state_dict(state)
            with pytest.raises(AssertionError, match="zero_grad"):
                optimizer.zero_grad()
        optimizer.step()
        return go(model, optimizer, rank, range(5, 8), 1)[-1]

    assert agreed(on_ranks(2, MODEL, lambda r, m: body(r, m, True))) == agreed(
        on_ranks(2, MODEL, lambda r, m: body(r, m, False))
    )


@pytest.mark.parametrize("what", ["unfrozen", "no_sync", "no_sync alone"])
def test_an_accumulation_holds_gradients_that_no_hook_has_counted(what: str) -> None:
    """Of a layer that was unfrozen since the last agreement, and of what only a pass in no_sync() has used."""

    def body(rank: int, model: Parts, restart: bool) -> str:
        model.a.requires_grad_(what != "unfrozen")
        optimizer = wrap(model, compression="topk", merging=SMALL, backward_passes_per_step=2)
        model.a.requires_grad_(True)
        passes = [(1, "ab" if what == "unfrozen" else "b"), (2, "b")]
        if what != "unfrozen":
            with optimizer.no_sync():
                model.loss(rank, 0, "a" if what == "no_sync" else "ab").backward()
        if what != "no_sync alone":
            model.loss(rank, *passes.pop(0)).backward()
        if restart:
            state = through_a_file(optimizer.state_dict())
            optimizer.close()
            model.zero_grad()
            optimizer = wrap(model, compression="topk", merging=SMALL, backward_passes_per_step=2)
            optimizer.load_state_dict(state)
        for one in passes:
            model.loss(rank, *one).backward()
        optimizer.step()
        return digest([*model.parameters(), *(kept for _, kept in sorted(residuals(optimizer).items()))])

    model = seeded(Parts)
    assert on_ranks(2, model, lambda r, m: body(r, m, True)) == on_ranks(2, model, lambda r, m: body(r, m, False))


def test_what_is_still_to_be_sent_is_sent_by_a_compressor_that_drops_nothing() -> None:
    """Also where it is a checkpoint that brings it."""

    def body(rank: int, model: nn.Module, way: str) -> str:
        optimizer = wrap(model, compression="topk", merging=SMALL)
        go(model, optimizer, rank, range(4), 1)
        optimizer.set_compressor("none")
        if way != "goes on":
            state = through_a_file(optimizer.state_dict())
            optimizer.close()
            optimizer = wrap(model, compression="none", merging=SMALL)
            optimizer.load_state_dict(state)
            if way == "copied":
                model, optimizer = copy.deepcopy((model, optimizer))
        go(model, optimizer, rank, range(4, 6), 1)
        assert not any(residual.any() for residual in residuals(optimizer).values())
        return digest(model)

    seen = [agreed(on_ranks(2, MODEL, lambda r, m, w=way: body(r, m, w))) for way in ("goes on", "restarts", "copied")]
    assert seen[0] == seen[1] == seen[2]


def test_only_one_rank_brings_something_to_a_compressor_that_drops_nothing() -> None:
    """Messages are the same with and without a memory, so ranks need not agree on it when they meet again."""

    def first(rank: int, model: nn.Module) -> Any:
        optimizer = wrap(model, compression="topk", merging=SMALL)
        go(model, optimizer, rank, range(4), 1)
        return through_a_file(optimizer.state_dict())

    saved = on_ranks(2, MODEL, first)[0]

    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer = wrap(model, compression="none", merging=SMALL)
        if rank == 0:
            optimizer.load_state_dict(saved)
        agmerge.broadcast_optimizer_state(optimizer, root_rank=0)
        optimizer.reset()
        seen = go(model, optimizer, rank, range(4, 7), 1)
        assert not any(residual.any() for residual in residuals(optimizer).values())
        return seen

    agreed(on_ranks(2, MODEL, body))


@pytest.mark.parametrize("compression", ["adtopk", "dgc", "none", "eden", "powersgd", "acpsgd"])
def test_after_a_plan_of_measured_times_that_was_recorded(compression: str) -> None:
    """The script's planner goes by times; the restarted one replays the plan that was in use."""

    def first(rank: int, model: nn.Module) -> Any:
        planner = merging.get("agmerge", check_every=0)
        optimizer = wrap(model, sgd(model, momentum=0.0), compression=compression, merging=planner, dense_sum="ordered")
        go(model, optimizer, rank, range(14), 1)
        saved = through_a_file((model.state_dict(), optimizer.state_dict())), optimizer.plan
        return saved, go(model, optimizer, rank, range(14, 24), 1)

    found = on_ranks(2, MODEL, first)

    def second(rank: int, model: nn.Module) -> list[str]:
        (states, plan), _ = found[rank]
        optimizer = wrap(model, sgd(model, momentum=0.0), compression=compression, merging=plan, dense_sum="ordered")
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        return go(model, optimizer, rank, range(14, 24), 1)

    assert agreed(on_ranks(2, MODEL, second)) == found[0][1]


def test_after_layers_were_unfrozen() -> None:
    def started(model: nn.Module) -> Any:
        return wrap(model, compression="dgc", memory="residual", merging=SMALL)

    def first(rank: int, model: nn.Sequential) -> Any:
        model[0].requires_grad_(False)
        optimizer = started(model)
        go(model, optimizer, rank, range(5), 1)
        model[0].requires_grad_(True)
        go(model, optimizer, rank, range(5, 10), 1)
        saved = through_a_file((model.state_dict(), optimizer.state_dict()))
        return saved, go(model, optimizer, rank, range(10, 20), 1)

    found = on_ranks(2, MODEL, first)

    def second(rank: int, model: nn.Module) -> list[str]:
        optimizer = started(model)
        model.load_state_dict(found[rank][0][0])
        optimizer.load_state_dict(found[rank][0][1])
        return go(model, optimizer, rank, range(10, 20), 1)

    assert agreed(on_ranks(2, MODEL, second)) == found[0][1]


def test_a_momentum_of_averages_that_only_rank_0_has_loaded_reaches_all() -> None:
    """What is sent whole gets DGC's momentum on the average, on every rank: replicas would part without it."""

    def body(rank: int, model: nn.Module) -> list[str]:
        def started() -> Any:
            return wrap(model, sgd(model, momentum=0.0), compression="dgc", memory=DGC)

        optimizer = started()
        go(model, optimizer, rank, range(5), 1)
        state = through_a_file(optimizer.state_dict())
        optimizer.close()
        optimizer = started()
        if rank == 0:
            optimizer.load_state_dict(state)
        return go(model, optimizer, rank, range(5, 8), 1)

    agreed(on_ranks(2, MODEL, body))
