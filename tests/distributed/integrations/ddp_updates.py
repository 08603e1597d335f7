# SPDX-License-Identifier: Apache-2.0
"""Local steps under DistributedDataParallel, against the wrapper around the plain model."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from ddp_awkward import Branches, run
from ddp_pairs import train
from support import digest, loss_of, mlp, seeded
from torch.nn.parallel import DistributedDataParallel

import agmerge
import merging
from agmerge.integrations import ddp

STEPS = 9
COMMON: dict[str, Any] = {"merging": merging.get("threshold", bytes=4096), "dense_sum": "ordered", "exchange": "sparse"}
UPDATES: dict[str, dict[str, Any]] = {
    "apply": {},
    "hold, decay": {"carry": "hold", "decay": 0.9},
    "every, overlap": {"every": 3, "overlap": 1},
    "fragments": {"every": 4, "fragments": 2},
    "outer": {"every": 3, "outer": agmerge.Nesterov()},
    "local": {"every": 3},
    "low rank": {"compression": "powersgd"},
    "unused": {"every": 2},
    "skipped": {"nonfinite": "skip"},
    "scaled": {"every": 2},
}


def updates_pair(options: dict[str, Any]) -> list[bool]:
    """Whether own parameters, shared ones and what is saved are equal after some steps, and passes to no_sync()."""
    branches = options is UPDATES["unused"]
    ours, theirs = (seeded(Branches if branches else mlp) for _ in range(2))
    model = DistributedDataParallel(ours, find_unused_parameters=branches)
    inner, other = (torch.optim.AdamW(net.parameters(), lr=0.01) for net in (ours, theirs))
    compressed = ddp.compress(model, optimizer=inner, sync="updates", **COMMON, **options)
    if options is UPDATES["local"]:
        optimizer: Any = agmerge.LocalOptimizer(other, theirs.named_parameters(), every=3, **COMMON)
    else:
        optimizer = agmerge.DistributedOptimizer(other, theirs.named_parameters(), sync="updates", **COMMON, **options)
    scales = options is UPDATES["scaled"]
    for forward, stepper in ((model, inner), (theirs, optimizer)):
        scaler = torch.amp.GradScaler("cpu", enabled=scales)
        for step in range(STEPS):
            stepper.zero_grad()
            if branches:
                run(forward, agmerge.rank(), step)
            else:
                bad = options in (UPDATES["skipped"], UPDATES["scaled"]) and step == 4 and agmerge.rank() == 1
                loss = loss_of(forward, agmerge.rank(), step) * (float("inf") if bad else 1.0)
                scaler.scale(loss).backward()
            if step % 2 and scales:
                scaler.unscale_(stepper)
                torch.nn.utils.clip_grad_norm_(forward.parameters(), 1.0)
            scaler.step(stepper)
            scaler.update()
    found = [digest(ours) == digest(theirs)]
    compressed.flush()
    optimizer.flush()
    saved = [one.state_dict()["agmerge"]["updates"]["base"] for one in (compressed, optimizer)]
    found.append(digest(saved[0].values()) == digest(saved[1].values()))
    own = digest(ours)
    with compressed.shared(), optimizer.shared():
        found += [digest(ours) == digest(theirs), digest(ours) != own or options.get("carry") == "hold"]
    found.append(compressed.stats()["bytes_sent"] == optimizer.stats()["bytes_sent"] > 0)
    found.append(compressed.stats()["steps_skipped"] == optimizer.stats()["steps_skipped"])
    for one in (compressed, optimizer):
        one.consolidate()
        one.close()
    return [*found, digest(ours) == digest(theirs), model.require_backward_grad_sync]


def updates_resumed() -> dict[str, Any]:
    """Three steps more, and from the checkpoints of each rank and of all, after a framework's, which has rank 0's."""
    net = seeded(mlp)
    model = DistributedDataParallel(net)
    inner = torch.optim.AdamW(net.parameters(), lr=0.01)
    compressed = ddp.compress(model, optimizer=inner, sync="updates", **COMMON)
    train(model, range(3), inner)
    checkpoints = [copy.deepcopy(compressed.state_dict()), agmerge.broadcast_object(agmerge.gather_state(compressed))]
    of_rank_0 = agmerge.broadcast_object((net.state_dict(), inner.state_dict()))
    train(model, range(3, 6), inner)
    found = [digest(net)]
    for checkpoint in checkpoints:
        net.load_state_dict(of_rank_0[0])
        inner.load_state_dict(copy.deepcopy(of_rank_0[1]))
        compressed.load_state_dict(checkpoint)
        train(model, range(3, 6), inner)
        found.append(digest(net))
    compressed.close()
    return {"bits": found, "keys": sorted(checkpoints[0])}


def updates_refused() -> dict[str, Any]:
    """What is said of steps that others would wait for; and what a script's own way of no_sync() comes to."""
    said: dict[str, Any] = {}
    net = seeded(mlp)
    model = DistributedDataParallel(net)
    inner = torch.optim.AdamW(net.parameters())
    compressed = ddp.compress(model, optimizer=inner, sync="updates", **COMMON)
    train(model, range(2), inner)
    model.require_backward_grad_sync = True  # as nanoGPT does before each pass
    train(model, range(2, 3), inner)
    said["gradients"] = digest([cast("torch.Tensor", parameter.grad) for parameter in net.parameters()])
    compressed.consolidate()
    said["parameters"] = digest(net)
    with model.join():
        try:
            train(model, range(6, 7), inner)
        except agmerge.AGMergeError as error:
            said["join"] = str(error)
    compressed.close()
    return said
