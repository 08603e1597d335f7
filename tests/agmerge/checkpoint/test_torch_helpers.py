# SPDX-License-Identifier: Apache-2.0
"""``torch.distributed.checkpoint`` by the recipe of docs/checkpoints.md: what is saved is resumed, to the bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import digest, mlp, on_ranks, seeded, train, wrap
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import agmerge
import merging

MODEL, HALF, STEPS = seeded(mlp), 3, 7
SMALL = merging.get("threshold", bytes=4096)
COMPRESSIONS = ["none", "topk", "adtopk", "dgc", "eden", "powersgd", "acpsgd", "fp16"]
INNER: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "decay": {"weight_decay": 0.1},
    "momentum and decay": {"momentum": 0.9, "weight_decay": 0.1},
}


def started(model: nn.Module, inner: str, compression: str) -> agmerge.DistributedOptimizer:
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, **INNER[inner])
    return wrap(model, sgd, compression=compression, merging=SMALL)


def parts(model: nn.Module, optimizer: agmerge.DistributedOptimizer, path: Path | None = None) -> dict[str, Any]:
    return {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer.optimizer),
        "residuals": agmerge.ResidualState(optimizer, path),
    }


def load(model: nn.Module, optimizer: agmerge.DistributedOptimizer, path: Path) -> None:
    state = parts(model, optimizer, path)
    dcp.load(state, checkpoint_id=path, no_dist=True)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer.optimizer, state["optimizer"])


@pytest.mark.parametrize("when", ["after step()", "after zero_grad()"])
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_the_recipe_resumes_to_the_bit(compression: str, inner: str, when: str, tmp_path: Path) -> None:
    def body(rank: int, model: nn.Module) -> None:
        again = copy.deepcopy(model)
        optimizer = started(model, inner, compression)
        train(model, optimizer, rank, range(HALF))
        if when == "after zero_grad()":
            optimizer.zero_grad()
        dcp.save(parts(model, optimizer), checkpoint_id=tmp_path, no_dist=True)
        expected = train(model, optimizer, rank, range(HALF, STEPS))
        resumed = started(again, inner, compression)
        load(again, resumed, tmp_path)
        assert train(again, resumed, rank, range(HALF, STEPS)) == expected

    on_ranks(1, MODEL, body)


@pytest.mark.parametrize("saved, loaded", [("topk", "dgc"), ("dgc", "topk")])
def test_a_momentum_goes_on_with_another_compressor(saved: str, loaded: str, tmp_path: Path) -> None:
    """An SGD's own is taken over by dgc; dgc's is kept, and saved, until a memory takes it up."""

    def body(rank: int, model: nn.Module) -> None:
        again = copy.deepcopy(model)
        optimizer = started(model, "momentum", saved)
        train(model, optimizer, rank, range(HALF))
        momentum = {p: s["momentum_buffer"].clone() for p, s in optimizer.optimizer.state.items()}
        optimizer.zero_grad()
        dcp.save(parts(model, optimizer), checkpoint_id=tmp_path, no_dist=True)
        other = started(again, "momentum", loaded)
        load(again, other, tmp_path)
        train(again, other, rank, range(HALF, HALF + 1))
        momenta = other.state_dict()["agmerge"]["momenta"]
        assert momenta and all(bool(tensor.any()) for name, tensor in momenta.items() if name.endswith("2.weight"))
        assert bool(momentum) is (saved == "topk")

    on_ranks(1, MODEL, body)


def test_training_goes_on_as_without_saving_and_keeps_no_empty_buffers() -> None:
    """torch steps an optimizer without a state, so that an SGD has buffers: they are no momentum of it."""

    def body(rank: int, model: nn.Module, saves: bool) -> list[str]:
        optimizer = started(model, "momentum", "dgc")
        train(model, optimizer, rank, range(HALF))
        optimizer.zero_grad()
        if saves:
            parts(model, optimizer)["residuals"].state_dict()
        optimizer.set_compressor("dgc", density=0.01)  # ranks agree anew: what the SGD has is taken over
        seen = train(model, optimizer, rank, range(HALF, STEPS))
        assert not any("momentum_buffer" in entry for entry in optimizer.optimizer.state.values())
        return seen

    assert on_ranks(1, MODEL, lambda r, m: body(r, m, True)) == on_ranks(1, MODEL, lambda r, m: body(r, m, False))


def test_a_plain_state_dict_has_no_empty_buffers() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = started(model, "momentum", "dgc")
        train(model, optimizer, rank, range(HALF))
        assert optimizer.state_dict()["state"] == {} and optimizer.optimizer.state_dict()["state"] == {}
        optimizer.close()
        assert get_optimizer_state_dict(model, optimizer.optimizer)["state"] == {}

    on_ranks(1, MODEL, body)


# -- the wrapper in place of the plain optimizer -----------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 2])
def test_torchs_helpers_get_the_plain_optimizer_or_an_error_that_says_so(steps: int) -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = started(model, "plain", "topk")
        train(model, optimizer, rank, range(steps))
        optimizer.zero_grad()
        before = optimizer.state_dict()["agmerge"]
        with pytest.raises(ValueError, match=r"get_optimizer_state_dict\(\) got the agmerge\.Distri") as told:
            get_optimizer_state_dict(model, optimizer)
        assert "get_optimizer_state_dict(model, optimizer.optimizer)" in str(told.value)
        assert "agmerge.ResidualState(optimizer)" in str(told.value)
        optimizer.zero_grad()
        after = optimizer.state_dict()["agmerge"]
        assert after["steps"] == before["steps"] == steps
        assert all(torch.equal(after["residuals"][name], before["residuals"][name]) for name in before["residuals"])
        with pytest.raises(ValueError, match=r"set_optimizer_state_dict\(\) got the agmerge\.DistributedOptimizer"):
            set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer.optimizer))

    on_ranks(1, MODEL, body)


def test_with_a_scheduler_around_the_step_it_is_found_too() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = started(model, "plain", "topk")
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # it replaces optimizer.step
        with pytest.raises(ValueError, match="got the agmerge"):
            get_optimizer_state_dict(model, optimizer)

    on_ranks(1, MODEL, body)


def test_what_a_helper_has_refused_is_digested_by_the_next_step() -> None:
    def body(rank: int, model: nn.Module, stray: bool) -> str:
        optimizer = started(model, "plain", "topk")
        train(model, optimizer, rank, range(2))
        optimizer.zero_grad()
        if stray:
            with pytest.raises(ValueError, match="got the agmerge"):
                get_optimizer_state_dict(model, optimizer)
            for group in optimizer.param_groups:
                group["lr"] = 0.1  # torch has put in 0, and did not come to put it back
        train(model, optimizer, rank, range(2, 5))
        return digest(model)

    assert on_ranks(1, MODEL, lambda r, m: body(r, m, True)) == on_ranks(1, MODEL, lambda r, m: body(r, m, False))
