# SPDX-License-Identifier: Apache-2.0
"""``sync="updates"`` in every way that it goes, for real workers and for ranks in memory alike."""

from __future__ import annotations

import copy
import functools
import io
from typing import Any

import torch
from support import digest, mlp, seeded, train

import agmerge
import merging
from agmerge import testing

STEPS = 8
COMMON: dict[str, Any] = {"merging": merging.get("threshold", bytes=4096), "dense_sum": "ordered", "exchange": "sparse"}
WAYS: dict[str, dict[str, Any]] = {
    "apply": {},
    "hold": {"carry": "hold"},
    "overlap": {"overlap": 1},
    "fragments, overlap": {"every": 4, "fragments": 2, "overlap": 2},
    "outer": {"every": 3, "outer": agmerge.Nesterov()},
    "two-level": {"exchange": "two-level", "carry": "hold"},
    "local": {"every": 3},
    "low rank": {"compression": "powersgd"},
    "low rank, overlap": {"compression": "acpsgd", "every": 2, "overlap": 1},
}
SAVED = (
    "apply",
    "fragments, overlap",
    "outer",
    "two-level",
    "low rank, overlap",
)  # the others are saved in memory alone
JOINED = ("hold", "fragments, overlap", "local")


def started(way: str, model: torch.nn.Module) -> Any:
    """AdamW, wrapped."""
    inner, options = torch.optim.AdamW(model.parameters(), lr=0.01), {**COMMON, **WAYS[way]}
    if way == "local":
        return agmerge.LocalOptimizer(inner, model.named_parameters(), **options)
    return agmerge.DistributedOptimizer(inner, model.named_parameters(), sync="updates", **options)


def shared(optimizer: Any, model: torch.nn.Module) -> str:
    """The bits of what all ranks have in common."""
    with optimizer.shared():
        return digest(model)


def trained(way: str, model: torch.nn.Module) -> dict[str, Any]:
    """Digests of this rank's own parameters step by step, and of the shared ones; then from a checkpoint again."""
    rank, half = agmerge.rank(), STEPS // 2
    optimizer = started(way, model)
    seen = train(model, optimizer, rank, range(half))
    optimizer.flush()
    file = io.BytesIO()
    if way in SAVED:  # a file a rank, or all ranks in one
        state = agmerge.broadcast_object(agmerge.gather_state(optimizer)) if way == "outer" else optimizer.state_dict()
        torch.save({"model": model.state_dict(), "optimizer": state}, file)
    seen += train(model, optimizer, rank, range(half, STEPS))
    found = {"own": seen, "shared": shared(optimizer, model)}
    optimizer.consolidate()
    found["consolidated"] = digest(model)
    optimizer.close()
    if way in SAVED:
        saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        other = copy.deepcopy(model)
        other.load_state_dict(saved["model"])
        optimizer = started(way, other)
        optimizer.load_state_dict(saved["optimizer"])
        found["again"] = [train(other, optimizer, rank, range(half, STEPS)), shared(optimizer, other)]
        optimizer.close()
    return found


def joined(way: str, model: torch.nn.Module) -> dict[str, Any]:
    """Every rank has another number of batches; the highest rank has most."""
    optimizer = started(way, model)
    train(model, optimizer, agmerge.rank(), range(2 * agmerge.rank() + 1))
    last = optimizer.join()
    found = {"last": last, "after": digest(model), "steps": optimizer.stats()["steps"]}
    optimizer.close()
    return found


def updates() -> dict[str, Any]:
    """All of them, one after another, on this rank."""
    return {
        **{way: trained(way, seeded(mlp, 31)) for way in WAYS},
        **{f"join, {way}": joined(way, seeded(mlp, 31)) for way in JOINED},
    }


@functools.cache
def in_memory(size: int) -> list[dict[str, Any]]:
    """The same on ``size`` ranks of an in-memory group: what each rank saw."""
    model, found = seeded(mlp, 31), [dict[str, Any]() for _ in range(size)]
    for prefix, ways, run in (("", WAYS, trained), ("join, ", JOINED, joined)):
        for way in ways:
            models = [copy.deepcopy(model) for _ in range(size)]
            seen = testing.run(size, lambda rank, way=way, run=run, models=models: run(way, models[rank]))
            for one, result in zip(found, seen, strict=True):
                one[f"{prefix}{way}"] = result
    return found
