# SPDX-License-Identifier: Apache-2.0
"""How the awkward model of support is trained: in several merge buffers, and with a layer that thaws on the way."""

from __future__ import annotations

from typing import Any

import torch

import agmerge
import merging
from support import AwkwardModel, awkward_batch, awkward_groups

THAW = 6  # the step from which on the frozen layer learns


def wrapped_awkward(model: AwkwardModel, lr: float = 0.05, **options: Any) -> agmerge.DistributedOptimizer:
    inner = torch.optim.SGD(awkward_groups(model), lr=lr, momentum=0.9)
    several = merging.get("threshold", bytes=8192)
    options = {"compression": "topk", "merging": several, "exchange": "sparse", **options}
    return agmerge.DistributedOptimizer(inner, model.named_parameters(), **options)


def backward(model: AwkwardModel, rank: int, step: int, thaw: int = THAW) -> None:
    if step == thaw:
        model.unfreeze()
    model.loss(awkward_batch(rank, step), rank, step).backward()
