"""Scenarios of scenarios.py: optimizers that were not closed, and DistributedDataParallel left on."""

from __future__ import annotations

import os
import time
import warnings

import torch
from support import loss_of, mlp, seeded, train, wrap

import agmerge


def dropped() -> list[int]:
    """Threads and files after each of some optimizers that were dropped, not closed, on one rank earlier.

    Every other one with messages on their way.
    """
    seen, kept = [], None
    for turn in range(7):
        model = seeded(mlp, 12)
        optimizer = wrap(model, exchange="sparse")
        train(model, optimizer, agmerge.rank(), range(2))
        if turn % 2:
            loss_of(model, agmerge.rank(), 2).backward()
        kept = optimizer if agmerge.rank() else None
        del optimizer
        agmerge.barrier()
        time.sleep(0.2)  # threads of Gloo's end
        seen.append(sum(len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd")))
    del kept
    return seen


def data_parallel() -> list[list[str]]:
    """What is said of a model that DistributedDataParallel holds, of one that it held, and of one beside it."""
    if agmerge.backend_name() != "torch":
        return []
    seen = []
    alive = torch.nn.parallel.DistributedDataParallel(seeded(mlp, 12))
    gone = torch.nn.parallel.DistributedDataParallel(seeded(mlp, 12))
    models = [alive, alive.module, gone.module, seeded(mlp, 13)]
    del gone
    for model in models:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            wrap(model).close()
        seen.append([str(one.message) for one in said])
    return seen
