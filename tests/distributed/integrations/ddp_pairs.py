# SPDX-License-Identifier: Apache-2.0
"""Train the same network twice, under ddp.compress and by the wrapper, in many ways, and compare bits."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from support import batch, digest, loss_of, mlp, same_bits, seeded, sgd, wrap
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import agmerge
from agmerge.integrations import ddp

STEPS = 12
SMALL = 0.005  # MB: three buckets
LOOPS = ("plain", "three passes", "clipped", "scaled")
MODELS: dict[str, dict[str, Any]] = {
    "one bucket": {},
    "three buckets": {"bucket_cap_mb": SMALL},
    "views": {"bucket_cap_mb": SMALL, "gradient_as_bucket_view": True},
    "static graph": {"bucket_cap_mb": SMALL, "static_graph": True},
    "unused": {"bucket_cap_mb": SMALL, "find_unused_parameters": True},
}
COMPRESSIONS = ("none", "fp16", "topk", "adtopk", "dgc")


def convolutions() -> nn.Sequential:
    """A network whose weights are in channels_last, and large enough to be selected from."""
    net = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, 8, 3, padding=1), nn.Flatten())
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def backward(model: nn.Module, rank: int, step: int, scaler: torch.amp.GradScaler | None = None) -> None:
    """The gradients of a batch, of images where the network takes those."""
    if any(isinstance(module, nn.Conv2d) for module in model.modules()):
        x, y = batch(rank, step)
        loss = cross_entropy(model(x.view(-1, 8, 2, 2)), y)
    else:
        loss = loss_of(model, rank, step)
    (loss if scaler is None else scaler.scale(loss)).backward()


def pair(
    model: str = "three buckets",
    compression: str = "topk",
    loop: str = "plain",
    channels: bool = False,
    exchange: str = "sparse",
) -> list[bool]:
    """Whether parameters, and residuals, are equal after some steps under the hook and by the wrapper."""
    build = convolutions if channels else mlp
    ours, theirs = seeded(build), seeded(build)
    options = {"merging": "threshold", "compression": compression, "exchange": exchange}
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3) for _ in range(2)]
    scaler = scalers if loop == "scaled" else [None, None]
    inner = sgd(ours)
    parallel = DistributedDataParallel(ours, **MODELS[model])
    compressed = ddp.compress(parallel, optimizer=inner, scaler=scaler[0], **options)
    hooked(parallel, inner, scaler[0], loop)
    passes = 3 if loop == "three passes" else 1
    others = {**options, "merging": compressed.plan, "scaler": scaler[1], "backward_passes_per_step": passes}
    optimizer = wrap(theirs, **others)
    wrapped(theirs, optimizer, scaler[1], loop)
    kept = [one.state_dict()["agmerge"] for one in (compressed, optimizer)]
    state = [
        {**one["residuals"], **{f"{name}/m": momentum for name, momentum in one["momenta"].items()}} for one in kept
    ]
    compressed.close()
    optimizer.close()
    same = state[0].keys() == state[1].keys() and all(same_bits(state[0][name], state[1][name]) for name in state[0])
    lossless = compression in ("none", "fp16")
    assert lossless or any(float(tensor.abs().max()) > 0 for tensor in state[0].values())
    return [digest(ours) == digest(theirs), same, digest(ours) != digest(seeded(build))]


def hooked(model: Any, inner: torch.optim.Optimizer, scaler: Any, loop: str) -> None:
    """A script as it is for DistributedDataParallel."""
    for step in range(STEPS):
        inner.zero_grad()
        if loop == "three passes":
            for part in range(2):
                with model.no_sync():
                    backward(model, agmerge.rank(), 100 * part + step)
        backward(model, agmerge.rank(), step, scaler)
        if loop == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if scaler is None:
            inner.step()
        else:
            scaler.step(inner)
            scaler.update()


def wrapped(model: nn.Module, optimizer: agmerge.DistributedOptimizer, scaler: Any, loop: str) -> None:
    """A script for the wrapper that means the same."""
    for step in range(STEPS):
        optimizer.zero_grad()
        if loop == "three passes":
            for part in range(2):
                backward(model, agmerge.rank(), 100 * part + step)
        backward(model, agmerge.rank(), step, scaler)
        if loop == "clipped":
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with optimizer.skip_synchronize():
                optimizer.step()
        elif scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


def train(model: nn.Module, steps: range, inner: torch.optim.Optimizer | None = None) -> None:
    """Plain steps of ``model``, as it is."""
    inner = inner or sgd(model)
    for step in steps:
        inner.zero_grad()
        backward(model, agmerge.rank(), step)
        inner.step()


# Few of them for `make test`: each model, compression and loop, and what can go wrong together.
CASES: dict[str, dict[str, Any]] = {
    "none": {"model": "one bucket", "compression": "none"},
    "fp16, views": {"model": "views", "compression": "fp16"},
    "topk, passes": {"model": "views", "loop": "three passes"},
    "topk, clipped": {"model": "one bucket", "loop": "clipped"},
    "topk, scaled": {"loop": "scaled"},
    "adtopk, static": {"model": "static graph", "compression": "adtopk"},
    "adtopk, unused, scaled": {"model": "unused", "compression": "adtopk", "loop": "scaled"},
    "dgc": {"compression": "dgc"},
    "dgc, views, passes": {"model": "views", "compression": "dgc", "loop": "three passes"},
    "rows, channels_last": {"compression": "adtopk-row", "channels": True},
    "rows, channels_last, views": {"model": "views", "compression": "adtopk-row", "channels": True},
    "low rank": {"compression": "powersgd"},
    "two-level, unused": {"model": "unused", "exchange": "two-level"},
    "oktopk": {"exchange": "oktopk"},
}
MATRIX: list[dict[str, Any]] = [
    {"model": model, "compression": compression, "loop": loop}
    for model, compression, loop in itertools.product(MODELS, COMPRESSIONS, LOOPS)
    if (model, loop) != ("static graph", "three passes")  # torch cannot begin a static graph in no_sync()
    if (compression, loop) != ("dgc", "clipped")  # a velocity, which is refused
]
