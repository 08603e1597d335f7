# SPDX-License-Identifier: Apache-2.0
"""The digits by every exchange that has more than one phase, for real workers and for ranks in memory alike."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from digits import DigitsCNN, load
from support import digest, seeded, sgd
from torch import nn

import agmerge
import merging
from agmerge import testing
from agmerge.backends import topology
from agmerge.exchanges.node_shards import collect

STEPS = 10
# Sums in rank order everywhere, so that the bits are those of any other group of as many ranks.
COMMON: dict[str, Any] = {"density": 0.2, "dense_sum": "ordered", "merging": merging.get("threshold", bytes=65536)}
EXCHANGES: dict[str, dict[str, Any]] = {
    "oktopk": {"exchange": "oktopk", "compression": "topk"},
    "oktopk in few bits": {"exchange": "oktopk", "compression": "topk", "wire": "int4"},
    "masked, by vote": {"exchange": "masked", "compression": "topk"},
    "masked in few bits": {"exchange": "masked", "compression": "topk", "wire": "int8"},
    "masked, drawn": {"exchange": "masked", "compression": "randomk"},
    "powersgd": {"exchange": "sparse", "compression": "powersgd"},
    "acpsgd": {"exchange": "sparse", "compression": "acpsgd"},
    "hybrid": {"exchange": "oktopk", "compression": {"conv.*": "topk", ".*": "acpsgd"}},
    "two-level, two nodes": {"exchange": "two-level", "compression": "topk"},
    "two-level, this machine": {"exchange": "two-level", "compression": "topk"},
}
FACTORED = ("powersgd", "acpsgd", "hybrid")  # round an element as the largest ones of its matrix


@contextmanager
def workers_a_node(name: str, size: int) -> Iterator[None]:
    """What an exchange of this name is told: half of the workers are a node, or nothing, so all on a host are."""
    try:
        if name.endswith("two nodes"):
            os.environ[topology.VARIABLE] = str(size // 2)
        yield
    finally:
        os.environ.pop(topology.VARIABLE, None)


def trained(name: str, model: nn.Module) -> dict[str, Any]:
    """Digests and this rank's losses, step by step; ``worst``: updates against mean gradients less final residuals, in
    roundings of the magnitudes that were added up."""
    x, y, _, _ = load()
    inner = sgd(model, lr=0.2)
    optimizer = agmerge.DistributedOptimizer(inner, model.named_parameters(), **COMMON, **EXCHANGES[name])
    given = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    taken = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    sizes = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    digests, losses = [], []
    for step in range(STEPS):
        start = 16 * (agmerge.size() * step + agmerge.rank())
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[start : start + 16]), y[start : start + 16])
        loss.backward()
        for total, size, p in zip(given, sizes, model.parameters(), strict=True):
            total += p.grad
            size += p.grad.abs()
        optimizer.synchronize()
        for total, p in zip(taken, model.parameters(), strict=True):
            total += p.grad
        with optimizer.skip_synchronize():
            optimizer.step()
        digests.append(digest(model))
        losses.append(loss.item())
    assert optimizer.plan is not None
    found = {"digests": digests, "losses": losses, "buffers": len(optimizer.plan.counts), "worst": 0.0, "kept": 0.0}
    residuals = optimizer.state_dict()["agmerge"]["residuals"]
    for (key, p), gradient, update, size in zip(model.named_parameters(), given, taken, sizes, strict=True):
        kept = _whole(residuals[key], p.shape) if key in residuals else torch.zeros_like(gradient)
        if name in FACTORED:
            size = size.clamp_min(size.max())
        expected = agmerge.allreduce(gradient - kept, name=f"expected/{key}")
        rounding = torch.finfo(torch.float32).eps * agmerge.allreduce(size, name=f"size/{key}")
        found["worst"] = max(found["worst"], float(((expected - update).abs() / rounding.clamp_min(1e-30)).max()))
        found["kept"] = max(found["kept"], float(kept.abs().max()))
    optimizer.close()
    return found


def _whole(residual: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A residual with zeros where other ranks of the node have theirs."""
    if residual.shape == shape:
        return residual.double()
    places = int(os.environ.get(topology.VARIABLE, agmerge.size()))
    rows = torch.zeros(places, residual.numel(), dtype=torch.float64)
    rows[agmerge.rank() % places] = residual.view(-1)
    whole = torch.zeros(shape, dtype=torch.float64)
    collect(rows, whole)
    return whole


def exchanges() -> dict[str, Any]:
    """All of them, one after another, on this rank."""
    seen = {}
    for name in EXCHANGES:
        with workers_a_node(name, agmerge.size()):
            seen[name] = trained(name, seeded(DigitsCNN, 23))
    return seen


@functools.cache
def in_memory(size: int) -> dict[str, list[dict[str, Any]]]:
    """The same on ``size`` ranks of an in-memory group: by exchange, what each rank saw."""
    seen = {}
    for name in EXCHANGES:
        models = [copy.deepcopy(seeded(DigitsCNN, 23)) for _ in range(size)]
        with workers_a_node(name, size):
            seen[name] = testing.run(size, lambda rank, name=name, models=models: trained(name, models[rank]))
    return seen
