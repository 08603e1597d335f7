# SPDX-License-Identifier: Apache-2.0
"""Make the optimizer of a recipe, and wrap it as the command line says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from jobs.base import Recipe
from torch import nn

import agmerge

Wrapped = agmerge.DistributedOptimizer


def rate(recipe: Recipe, workers: int, passes: int) -> float:
    """Return the highest learning rate for ``workers``, each of which sums ``passes`` batches a step."""
    grown = {"none": 1.0, "workers": float(workers * passes), "root": math.sqrt(workers * passes)}
    return recipe.lr * grown[recipe.growth]


def plain(recipe: Recipe, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return the optimizer of the recipe, as a script for one worker would make it."""
    groups = decaying(recipe, model)
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=recipe.momentum, weight_decay=recipe.wd)
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    return kinds[recipe.optimizer](groups, lr=lr, weight_decay=recipe.wd)


def decaying(recipe: Recipe, model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameters in one group, or in two where biases and norms do not decay."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not recipe.spared:
        return [{"params": parameters}]
    return [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def wrapped(
    optimizer: torch.optim.Optimizer, model: nn.Module, options: Mapping[str, Any], local_steps: int | None, passes: int
) -> Wrapped:
    """Collective. Return the optimizer, distributed; all workers start from the parameters and buffers of rank 0.

    Args:
        optimizer: of the parameters of ``model``.
        options: what the library is given; what is not among them is left to it.
        local_steps: steps that workers make by themselves between two exchanges; None: they exchange in every step.
        passes: backward passes a step.

    Raises ``TypeError`` or ``ValueError`` for options that do not go together.
    """
    agmerge.broadcast_parameters(model.state_dict(), root_rank=0)
    agmerge.broadcast_optimizer_state(optimizer, root_rank=0)
    if local_steps is not None:
        named, extra = model.named_parameters(), {"backward_passes_per_step": passes}
        return agmerge.LocalOptimizer(optimizer, named, every=local_steps, **extra, **options)
    return agmerge.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        backward_passes_per_step=passes,
        **options,
    )
