# SPDX-License-Identifier: Apache-2.0
"""What tests of several optimizers around one model share: Muon for its matrices, AdamW for what is no matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import agmerge
import merging
from support import digest, loss_of, mlp, seeded, wrap

MODEL = seeded(mlp)
SMALL = merging.get("threshold", bytes=4096)
MUON: Any = getattr(torch.optim, "Muon", torch.optim.RMSprop)  # torch has it since 2.9
SPARSE: dict[str, Any] = {"compression": "topk", "density": 0.05, "merging": SMALL}
WHOLE: dict[str, dict[str, Any]] = {
    "none": {"compression": "none"},
    "density 1": {"compression": "topk", "density": 1.0},
}


def halves(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices, and what is none."""
    return [p for p in model.parameters() if p.dim() == 2], [p for p in model.parameters() if p.dim() != 2]


def pair(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon and AdamW, each with its own rate."""
    matrices, others = halves(model)
    return [MUON(matrices, lr=0.02, weight_decay=0.1), torch.optim.AdamW(others, lr=0.01)]


def sgds(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Two SGDs with their own momenta."""
    matrices, others = halves(model)
    return [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.SGD(others, lr=0.05, momentum=0.5)]


def both(model: nn.Module, **options: Any) -> agmerge.DistributedOptimizer:
    """One wrapper around :func:`pair`."""
    inner: Any = pair(model)
    return wrap(model, inner, **{**SPARSE, **options})


def average(model: nn.Module, size: int, step: int) -> None:
    """Give one process the gradients that ``size`` ranks have on average, added up in their order."""
    parameters, sums = list(model.parameters()), None
    for rank in range(size):
        own = [gradient / size for gradient in torch.autograd.grad(loss_of(model, rank, step), parameters)]
        sums = own if sums is None else [total + more for total, more in zip(sums, own, strict=True)]
    for parameter, gradient in zip(parameters, sums or [], strict=True):
        parameter.grad = gradient


def alone(model: nn.Module, optimizers: list[torch.optim.Optimizer], size: int, steps: range) -> list[str]:
    """Train one process by plain optimizers with what so many ranks have on average; digests by step."""
    seen = []
    for step in steps:
        average(model, size, step)
        for optimizer in optimizers:
            optimizer.step()
        seen.append(digest(model))
    return seen


def moments(optimizers: list[torch.optim.Optimizer]) -> str:
    """The bits of all that optimizers keep, in the order of their parameters."""
    return digest(
        torch.as_tensor(value)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        for _, value in sorted(optimizer.state.get(parameter, {}).items())
    )
