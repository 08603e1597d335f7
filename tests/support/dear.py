# SPDX-License-Identifier: Apache-2.0
"""Wrappers with merging="dear" and without, and what both must find alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import agmerge
import merging
from support import (
    Parts,
    agreed,
    loss_of,
    mlp,
    on_ranks,
    seeded,
    sgd,
)

MODEL, PARTS = seeded(mlp), seeded(Parts)


SMALL = merging.get("dear", bytes=4000)  # from step 10 on, a merge buffer for each layer of MODEL


Build = Callable[[nn.Module], torch.optim.Optimizer]


def dear(model: nn.Module, inner: torch.optim.Optimizer | None = None, **options: Any) -> agmerge.DistributedOptimizer:
    options = {"compression": "none", "merging": SMALL, **options}
    return agmerge.DistributedOptimizer(inner or sgd(model), model.named_parameters(), model=model, **options)


def plain(model: nn.Module, inner: torch.optim.Optimizer | None = None, **options: Any) -> agmerge.DistributedOptimizer:
    options = {"compression": "none", **options}
    return agmerge.DistributedOptimizer(inner or sgd(model), model.named_parameters(), **options)


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    """Two groups, each with its own learning rate and weight decay."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    flat = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": flat, "lr": 0.02, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.003, **options)


def same(size: int, model: nn.Module, body: Callable[[int, Any, Any], Any], **options: Any) -> Any:
    """Return what ``body(rank, model, wrapper)`` finds, on every rank, with DeAR and without."""
    found = [agreed(on_ranks(size, model, lambda r, m, w=w: body(r, m, w), **options)) for w in (plain, dear)]
    assert found[0] == found[1]
    return found[1]


def train(model: nn.Module, optimizer: Any, rank: int, steps: Any) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
