# SPDX-License-Identifier: Apache-2.0
"""What would train worse without a word: clipping a velocity under DistributedDataParallel, and steps of shards."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from support import digest, loss_of, mlp, seeded, sgd, wrap
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import agmerge
from agmerge.integrations import ddp
from agmerge.script import sharded_steps

COMMON: dict[str, Any] = {"exchange": "sparse", "merging": "threshold", "density": 0.05}


def zero(model: nn.Module, **more: Any) -> ZeroRedundancyOptimizer:
    """torch's, of AdamW."""
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, **more)


def trained(model: Any, optimizer: Any, clip: float | None = None) -> str:
    """Steps; what is said by the one that raises, else the bits."""
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, agmerge.rank(), step).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        try:
            optimizer.step()
        except ValueError as error:
            return f"{step}: {error}"
    return digest(model)


def clipped(**options: Any) -> list[str]:
    """What is said of a script that clips, by the error or in warnings."""
    net = seeded(mlp)
    model, inner = DistributedDataParallel(net), sgd(net)
    compressed = ddp.compress(model, optimizer=inner, **COMMON, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = trained(model, inner, clip=0.05)
    compressed.close()
    return [found, *[str(one.message) for one in caught if "AGM125" in str(one.message)]]


def constructed(make: Callable[[nn.Module], Any]) -> str:
    """What is said at construction."""
    try:
        make(seeded(mlp)).close()
    except ValueError as error:
        return str(error)
    return ""


def harms() -> dict[str, Any]:
    """What is said, and bits of what works."""
    found: dict[str, Any] = {"velocity": clipped(compression="dgc"), "selection": clipped(compression="topk")}
    found["wrapper"] = constructed(lambda net: wrap(net, zero(net), compression="topk", sync="updates"))
    found["hooks"] = constructed(
        lambda net: ddp.compress(DistributedDataParallel(net), optimizer=zero(net), sync="updates", **COMMON)
    )
    found["alike"] = []
    for kind in (zero, lambda model: torch.optim.AdamW(model.parameters(), lr=0.01)):  # with sync="gradients"
        net = seeded(mlp)
        optimizer = wrap(net, kind(net), compression="topk")
        found["alike"].append(trained(net, optimizer))
        optimizer.close()
        net = seeded(mlp)
        model, inner = DistributedDataParallel(net), kind(net)
        compressed = ddp.compress(model, optimizer=inner, compression="topk", **COMMON)
        found["alike"].append(trained(model, inner))
        compressed.close()
    known, sharded_steps.CLASSES = sharded_steps.CLASSES, frozenset()
    net = seeded(mlp)
    optimizer = wrap(net, zero(net), compression="topk", sync="updates")
    found["seen"] = trained(net, optimizer)
    optimizer.close()
    net = seeded(mlp)
    model, inner = DistributedDataParallel(net), zero(net)
    compressed = ddp.compress(model, optimizer=inner, compression="topk", sync="updates", **COMMON)
    found["seen by hooks"] = trained(model, inner)
    compressed.close()
    sharded_steps.CLASSES = known
    return found
