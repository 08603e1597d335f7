# SPDX-License-Identifier: Apache-2.0
"""Several optimizers of one DistributedDataParallel, against one wrapper around as many, and the plain model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from support import digest, loss_of, mlp, seeded
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import agmerge
import merging
from agmerge.integrations import ddp

COMMON: dict[str, Any] = {"merging": merging.get("threshold", bytes=4096), "dense_sum": "ordered", "exchange": "sparse"}
MUON: Any = getattr(torch.optim, "Muon", torch.optim.RMSprop)
WAYS: dict[str, dict[str, Any]] = {
    "none": {"compression": "none"},
    "topk": {"compression": "topk", "density": 0.05},
    "dgc": {"compression": "dgc", "density": 0.05},
    "scaled": {"compression": "topk", "density": 0.05},
    "updates": {"sync": "updates"},
    "updates, every, overlap": {"sync": "updates", "every": 3, "overlap": 1},
    "updates, held": {"sync": "updates", "carry": "hold"},
}


def made(net: nn.Module, momentum: bool) -> list[Any]:
    """Muon and AdamW; or two SGDs, whose ``momentum`` is applied before selection."""
    matrices = [parameter for parameter in net.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in net.parameters() if parameter.dim() != 2]
    if momentum:
        return [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.SGD(others, lr=0.1, momentum=0.5)]
    return [MUON(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


def trained(forward: Any, steppers: list[Any], steps: range, scaler: Any = None) -> None:
    """Train, each optimizer stepped by itself; in step 4 a gradient of rank 1 is infinite where there is a scaler."""
    for step in steps:
        forward.zero_grad()
        bad = scaler is not None and (step, agmerge.rank()) == (4, 1)
        loss = loss_of(forward, agmerge.rank(), step) * (float("inf") if bad else 1.0)
        (loss if scaler is None else scaler.scale(loss)).backward()
        for stepper in steppers:
            stepper.step() if scaler is None else scaler.step(stepper)
        if scaler is not None:
            scaler.update()


def pair(way: str) -> list[Any]:
    """Whether parameters and what is kept are equal after some steps; what the list is called by."""
    options = {**COMMON, **WAYS[way]}
    ours, theirs = seeded(mlp), seeded(mlp)
    model, inner = DistributedDataParallel(ours), made(ours, way == "dgc")
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) if way == "scaled" else None for _ in range(2)]
    compressed = ddp.compress(model, optimizer=inner, scaler=scalers[0], **options)
    trained(model, inner, range(9), scalers[0])
    options["merging"] = compressed.plan if "sync" not in options else options["merging"]
    outer: Any = made(theirs, way == "dgc")
    optimizer = agmerge.DistributedOptimizer(outer, theirs.named_parameters(), scaler=scalers[1], **options)
    trained(theirs, [optimizer], range(9), scalers[1])
    found = [digest(ours) == digest(theirs)]
    kept = [one.state_dict()["agmerge"] for one in (compressed, optimizer)]
    for kind in ("residuals", "momenta"):
        found.append(digest(kept[0][kind].values()) == digest(kept[1][kind].values()))
    found.append(compressed.optimizers == inner and compressed.stats()["steps"] == optimizer.stats()["steps"] > 0)
    compressed.consolidate()
    optimizer.consolidate()
    compressed.close()
    optimizer.close()
    return [*found, digest(ours) == digest(theirs) != digest(seeded(mlp)), digest(ours)]


def resumed() -> list[str]:
    """Three steps more, and once more from a checkpoint of each rank, after a framework's, which has rank 0's."""
    net = seeded(mlp)
    model, inner = DistributedDataParallel(net), made(net, False)
    compressed = ddp.compress(model, optimizer=inner, sync="updates", **COMMON)
    trained(model, inner, range(3))
    own = copy.deepcopy(compressed.state_dict())
    of_rank_0 = agmerge.broadcast_object((net.state_dict(), [one.state_dict() for one in inner]))
    trained(model, inner, range(3, 6))
    found = [digest(net)]
    net.load_state_dict(of_rank_0[0])
    for one, state in zip(inner, of_rank_0[1], strict=True):
        one.load_state_dict(state)
    compressed.load_state_dict(own)
    trained(model, inner, range(3, 6))
    found.append(digest(net))
    compressed.close()  # which makes ranks equal
    return found


def said() -> list[str]:
    """What is said of one that steps twice, and of a parameter that two have."""
    net, texts = seeded(mlp), []
    model, inner = DistributedDataParallel(net), made(net, False)
    try:
        ddp.compress(model, optimizer=[*inner, torch.optim.SGD([net[2].weight], lr=0.1)], compression="topk")
    except ValueError as error:
        texts.append(str(error))
    compressed = ddp.compress(model, optimizer=inner, sync="updates", **COMMON)
    trained(model, inner, range(1))
    try:
        trained(model, [inner[0], inner[0]], range(1, 2))
    except agmerge.AGMergeError as error:
        texts.append(str(error))
    compressed.close()
    return texts


def several() -> dict[str, Any]:
    """All of it."""
    return {"ways": {way: pair(way) for way in WAYS}, "resumed": resumed(), "said": said()}
