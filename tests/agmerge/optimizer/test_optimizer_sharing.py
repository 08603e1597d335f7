# SPDX-License-Identifier: Apache-2.0
"""Several wrappers in one process: two optimizers, one parameter, and a wrapper that was dropped."""

from __future__ import annotations

import gc

import pytest
import torch
from support import (
    WIDTH,
    agreed,
    batch,
    digest,
    loss_of,
    mlp,
    on_ranks,
    seeded,
    sgd,
    train,
    wrap,
)
from torch import nn
from torch.nn import functional as F

import agmerge
from agmerge import testing

MODEL = seeded(mlp)


def test_two_optimizers_take_turns_and_share_nothing() -> None:
    """A GAN's training loop: each step of one runs backward through the other."""
    torch.manual_seed(1)
    pair = nn.ModuleDict({"g": nn.Linear(WIDTH, WIDTH), "d": nn.Linear(WIDTH, 2)})

    def body(rank: int, model: nn.ModuleDict) -> list[str]:
        g = agmerge.DistributedOptimizer(sgd(model["g"]), model["g"].named_parameters())
        d = agmerge.DistributedOptimizer(sgd(model["d"]), model["d"].named_parameters(), compression="none")
        seen = []
        for step in range(6):
            x, _ = batch(rank, step)
            d.zero_grad()
            F.cross_entropy(model["d"](torch.cat([x, model["g"](x).detach()])), torch.arange(16) // 8).backward()
            if step % 2:  # the other's whole step comes between backward and step of this one
                model["d"].requires_grad_(False)
                g.zero_grad()
                F.cross_entropy(model["d"](model["g"](x)), torch.zeros(8, dtype=torch.long)).backward()
                g.step()
                model["d"].requires_grad_(True)
            d.step()
            seen.append(digest(model))
        assert (g.stats()["steps"], d.stats()["steps"]) == (3, 6)
        return seen

    assert len(set(agreed(on_ranks(3, pair, body)))) == 6


def test_a_parameter_belongs_to_one_living_wrapper() -> None:
    def body(rank: int, model: nn.Module) -> str:
        first = wrap(model)
        with pytest.raises(ValueError, match="of the other one first, or pass different"):
            wrap(model, sgd(model))
        with pytest.raises(TypeError, match="optimizer is already a DistributedOptimizer"):
            wrap(model, first)
        train(model, first, rank, range(2))
        first.close()
        with pytest.raises(agmerge.AGMergeError, match="AGM123"):
            first.step()
        second = wrap(model, first.optimizer)
        train(model, second, rank, range(2, 4))
        return digest(model)

    agreed(on_ranks(2, MODEL, body))


def test_a_wrapper_that_was_dropped_hears_nothing_more() -> None:
    def body(rank: int, model: nn.Module) -> str:
        dropped = wrap(model)
        train(model, dropped, rank, range(2))
        inner = dropped.optimizer
        del dropped
        gc.collect()
        calls = len(testing.calls())
        for _ in range(2):  # twice without a step: guards are gone too
            loss_of(model, rank, 2).backward()
        assert len(testing.calls()) == calls
        inner.zero_grad()
        return train(model, wrap(model, inner), rank, range(2, 4))[-1]

    agreed(on_ranks(2, MODEL, body))
