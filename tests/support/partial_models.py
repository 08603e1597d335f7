# SPDX-License-Identifier: Apache-2.0
"""Models of which a few layers fit into half of a tenth, and what the tests of dense="partial" ask of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import agmerge
import support
from agmerge.planning.cost_probe import MeasuredCosts
from merging import Curve, Pieces, dense_cutoff
from support import seeded, wrap

SIZES = [(32, 32), (32, 48), (48, 64), (64, 256), (256, 256), (256, 10)]  # 1024 and 1536 elements may go dense
DENSITY = 0.1


def chain() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(*size, bias=False) for size in SIZES))


def with_biases() -> nn.Sequential:
    return nn.Sequential(*(layer for size in SIZES for layer in (nn.Linear(*size), nn.Tanh())))


def convolutions() -> nn.Sequential:
    """1152 elements may go dense; behind the classifier nothing is flat by chance."""
    return nn.Sequential(
        nn.Unflatten(1, (8, 2, 2)), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 64, 3, padding=1),
        nn.BatchNorm2d(64), nn.Flatten(), nn.Linear(256, 200), nn.Linear(200, 10),
    )  # fmt: skip


MODEL, BUILDERS = seeded(chain), [chain, with_biases, convolutions]


def backward(model: nn.Module, rank: int, step: int) -> None:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(100 * step + rank))
    model(x).square().mean().backward()


train = functools.partial(support.train, backward=backward)


def wrapped(model: nn.Module, lr: float = 0.01, **options: Any) -> agmerge.DistributedOptimizer:
    options = {"compression": "topk", "density": DENSITY, "dense": "partial", **options}
    return wrap(model, torch.optim.SGD(model.parameters(), lr=lr), **options)


def cut(optimizer: agmerge.DistributedOptimizer) -> tuple[int | None, bool]:
    rule = optimizer._reducer.exchange.agreed.config.compression.partial
    assert rule is not None
    return rule.elements, rule.final


def sparse(optimizer: agmerge.DistributedOptimizer) -> set[str]:
    return {name for name, tensor_class in agmerge.testing.inspect(optimizer).classes.items() if tensor_class.sparse}


def choosing(chosen: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The cut that rank 0 finds, in place of one by times; how often it was asked."""
    asked: list[int] = []

    def choose(*arguments: Any) -> int:
        asked.append(arguments[5])
        return chosen

    monkeypatch.setattr(dense_cutoff, "choose", choose)
    return asked


def costing(selecting: float) -> Callable[..., Pieces[MeasuredCosts]]:
    """A probe that finds a second for an element of load, and so many for one that is selected from."""

    def probe(*_: object) -> Pieces[MeasuredCosts]:
        yield from ()
        return MeasuredCosts(Curve((0, 1000), (0.0, selecting * 1000.0)), Curve((0, 1000), (0.0, 1000.0)), None)

    return probe
