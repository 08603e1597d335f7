# SPDX-License-Identifier: Apache-2.0
"""What a script reads and writes between the steps of a wrapper with ``sync="updates"``, and what is said of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import agreed, backward, digest, mlp, on_ranks, seeded
from torch import nn

import agmerge
from agmerge.script.parameter_access import FIRST, THEN

MODEL = seeded(mlp)
ROADS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "updates": lambda model, inner: agmerge.DistributedOptimizer(
        inner, model.named_parameters(), sync="updates", exchange="sparse"
    ),
    "local steps": lambda model, inner: agmerge.LocalOptimizer(
        inner, model.named_parameters(), every=3, exchange="sparse"
    ),
}
Act = Callable[[nn.Module, list[torch.Tensor], Any], None]


def ema(model: nn.Module, average: list[torch.Tensor], optimizer: Any) -> None:
    """Follow a model with an average of its weights."""
    with torch.no_grad():
        for old, new in zip(average, model.parameters(), strict=True):
            old.lerp_(new, 0.1)


def shared_ema(model: nn.Module, average: list[torch.Tensor], optimizer: Any) -> None:
    with optimizer.shared():
        ema(model, average, optimizer)


def clamp(model: nn.Module, average: list[torch.Tensor], optimizer: Any) -> None:
    """Bound the weights, as a WGAN's script does."""
    for parameter in model.parameters():
        parameter.data.clamp_(-0.05, 0.05)


def ran(road: str, act: Act, steps: range, until: int) -> tuple[list[str], list[str]]:
    """Warnings, and digests of each rank's average: ``act`` comes after each of ``steps``."""

    def body(rank: int, model: nn.Module) -> str:
        average = [torch.zeros_like(parameter) for parameter in model.parameters()]
        optimizer = ROADS[road](model, torch.optim.AdamW(model.parameters(), lr=0.01))
        for step in range(1, until + 1):
            optimizer.zero_grad()
            backward(model, rank, step)
            optimizer.step()
            if step in steps:
                act(model, average, optimizer)
        optimizer.consolidate()
        return digest(average)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        digests = on_ranks(2, MODEL, body)
    texts = [str(warning.message) for warning in caught]
    known = {"read": "AGM146", "written": "AGM145"}
    return [name for text in texts for name, words in known.items() if text.startswith(words)], digests


@pytest.mark.parametrize("road", ROADS)
def test_an_average_of_each_ranks_own_weights_is_told_once_and_that_of_the_shared_ones_is_one(road: str) -> None:
    told, digests = ran(road, ema, range(1, 6), 6)
    assert told == ["read"] and digests[0] != digests[1]
    told, digests = ran(road, shared_ema, range(1, 6), 6)
    assert told == []
    agreed(digests)


@pytest.mark.parametrize("road", ROADS)
def test_a_bound_after_each_step_is_told_once(road: str) -> None:
    assert ran(road, clamp, range(1, 6), 6)[0] == ["written"]


def test_an_average_that_begins_late_is_found_later() -> None:
    assert ran("updates", ema, range(FIRST + 2, THEN + 1), THEN - 1)[0] == []
    assert ran("updates", ema, range(FIRST + 2, THEN + 1), THEN)[0] == ["read"]


def test_the_values_that_a_script_puts_back_are_no_write() -> None:
    """As SAM does, with other tensors of the same values."""

    def swap(model: nn.Module, average: list[torch.Tensor], optimizer: Any) -> None:
        for parameter in model.parameters():
            before = parameter.data
            parameter.data = torch.zeros_like(before)
            parameter.data = before

    assert ran("updates", swap, range(1, 4), 4)[0] == []
