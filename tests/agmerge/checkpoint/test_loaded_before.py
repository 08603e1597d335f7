# SPDX-License-Identifier: Apache-2.0
"""A resume in the script's own way: what an agmerge optimizer has saved is loaded before the optimizer is wrapped."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from support import mlp, on_ranks, seeded, sgd, train, wrap
from torch import nn

import agmerge
from agmerge.engine.optimizer_group import MARK

MODEL = seeded(mlp)
UPDATES: dict[str, Any] = {"compression": "topk", "sync": "updates"}
TOPK: dict[str, Any] = {"compression": "topk"}


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def saved(model: nn.Module, rank: int, options: dict[str, Any], steps: int = 3) -> dict[str, Any]:
    """What a script saves after some steps."""
    copied = copy.deepcopy(model)
    optimizer = agmerge.DistributedOptimizer(sgd(copied), copied.named_parameters(), **options)
    train(copied, optimizer, rank, range(steps))
    return through_a_file(optimizer.state_dict())


def said(what: Any) -> list[str]:
    """The warnings of a call that say that something was not loaded."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        what()
    return [text for warning in caught if "AGM403" in (text := str(warning.message))]


@pytest.mark.parametrize("options", [TOPK, UPDATES], ids=str)
def test_the_wrapper_warns_once_with_the_two_lines_that_load_it(options: dict[str, Any]) -> None:
    def body(rank: int, model: nn.Module) -> None:
        state = saved(model, rank, options)
        inner = sgd(model)
        inner.load_state_dict(state)  # as nanoGPT and imagenet do it
        made: list[Any] = []
        told = said(lambda: made.append(agmerge.DistributedOptimizer(inner, model.named_parameters(), **options)))
        (optimizer,) = made
        assert len(told) == 1 and "a checkpoint of agmerge" in told[0]
        assert "\n    optimizer = agmerge.DistributedOptimizer(optimizer, ...)\n" in told[0]
        assert "\n    optimizer.load_state_dict(state)" in told[0]
        assert said(lambda: train(model, optimizer, rank, range(1))) == []
        optimizer.load_state_dict(state)
        assert MARK not in inner.state
        kept = optimizer.state_dict()["agmerge"]["residuals"]
        assert all(torch.equal(kept[name], tensor) for name, tensor in state["agmerge"]["residuals"].items())
        again = sgd(model)
        again.load_state_dict(inner.state_dict())  # the plain one's own state is no such file
        optimizer.close()
        assert said(lambda: wrap(model, again)) == []

    on_ranks(1, MODEL, body)


@pytest.mark.parametrize("options", [{**TOPK, "memory": "residual"}, UPDATES, {"compression": "acpsgd"}], ids=str)
def test_sgd_without_momentum_warns_too(options: dict[str, Any]) -> None:
    """It has no state by parameter, of its own or of the checkpoint."""

    def plain(model: nn.Module) -> torch.optim.SGD:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def body(rank: int, model: nn.Module) -> None:
        twin = copy.deepcopy(model)
        optimizer = wrap(twin, plain(twin), **options)
        train(twin, optimizer, rank, range(3))
        state = through_a_file(optimizer.state_dict())
        inner, same = plain(model), plain(model)
        inner.load_state_dict(state)
        same.load_state_dict(through_a_file(inner.state_dict()))  # the plain one's own state is no such file
        assert inner.state_dict() == same.state_dict() == plain(model).state_dict()
        made: list[Any] = []
        assert len(said(lambda: made.append(wrap(model, inner, **options)))) == 1
        (resumed,) = made
        resumed.load_state_dict(state)
        resumed.close()
        assert said(lambda: wrap(model, inner)) == said(lambda: wrap(model, same)) == []

    on_ranks(1, MODEL, body)


def test_of_several_ranks_one_warns() -> None:
    def body(rank: int, model: nn.Module) -> bool:
        inner = sgd(model)
        inner.load_state_dict(saved(model, rank, TOPK))
        agmerge.DistributedOptimizer(inner, model.named_parameters(), **TOPK)
        return MARK in inner.state

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert on_ranks(2, MODEL, body) == [False, False]
    assert sum("AGM403" in str(warning.message) for warning in caught) == 1


@pytest.mark.parametrize("compression", ["none", "eden"])
def test_where_nothing_was_kept_nothing_is_said(compression: str) -> None:
    def body(rank: int, model: nn.Module) -> None:
        state = saved(model, rank, {"compression": compression})
        assert state["agmerge"]["residuals"] == {}
        assert MARK not in state["state"]
        inner = sgd(model)
        inner.load_state_dict(state)
        assert said(lambda: wrap(model, inner)) == []

    on_ranks(1, MODEL, body)


def test_several_optimizers_and_local_sync_warn_too() -> None:
    def body(rank: int, model: nn.Module) -> None:
        twin = copy.deepcopy(model)

        def pair(of: nn.Module) -> list[torch.optim.Optimizer]:
            first, *others = of.parameters()
            return [torch.optim.SGD([first], lr=0.1), torch.optim.AdamW(others, lr=1e-3)]

        optimizer = wrap(twin, pair(twin), compression="topk")  # type: ignore[arg-type]
        train(twin, optimizer, rank, range(2))
        plain = pair(model)
        for each, state in zip(plain, optimizer.state_dict()["optimizers"], strict=True):
            each.load_state_dict(state)
        assert len(said(lambda: wrap(model, plain, compression="topk"))) == 1  # type: ignore[arg-type]
        inner = torch.optim.AdamW(model.parameters())
        inner.state[MARK] = {}  # type: ignore[index]
        (text,) = said(lambda: agmerge.LocalSync(model, inner))
        assert "sync = agmerge.LocalSync(model, optimizer, ...)\n    sync.load_state_dict(state)" in text

    on_ranks(1, MODEL, body)


def test_ranks_of_which_one_has_loaded_have_the_same_options_and_lengths() -> None:
    """What Horovod's ``broadcast_optimizer_state`` compares: groups by their keys, and whether there is a state."""

    def body(rank: int, model: nn.Module) -> None:
        for momentum in (0.0, 0.9):
            copied = copy.deepcopy(model)
            inner = torch.optim.SGD(copied.parameters(), lr=0.1, momentum=momentum)
            optimizer = agmerge.DistributedOptimizer(inner, copied.named_parameters(), memory="residual", **TOPK)
            train(copied, optimizer, rank, range(2))
            state = through_a_file(optimizer.state_dict())
            assert state["agmerge"]["residuals"]
            plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
            keys = plain.param_groups[0].keys()
            plain.load_state_dict(state)
            assert plain.param_groups[0].keys() == keys
            count = len(list(model.parameters())) + 1 if momentum else 0
            assert (MARK in plain.state) is bool(momentum) and len(plain.state) == count

    on_ranks(2, MODEL, body)
