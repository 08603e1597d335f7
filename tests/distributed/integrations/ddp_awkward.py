# SPDX-License-Identifier: Apache-2.0
"""Tensors that some ranks use and others do not, or nobody: what is applied, and what is kept."""

from __future__ import annotations

from typing import Any

import torch
from support import AwkwardModel, awkward_batch, batch, digest, seeded
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import agmerge
from agmerge.integrations import ddp

OPTIONS: dict[str, Any] = {"exchange": "sparse", "merging": "threshold", "density": 0.05}
STEPS = 30


class Branches(nn.Module):
    """Layers that a batch uses or not."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.seldom, self.first = nn.Linear(32, 48), nn.Linear(48, 48), nn.Linear(48, 48)
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor, rank: int, step: int) -> Tensor:
        """``seldom`` is used in two steps of three, ``first`` on rank 0 alone."""
        x = torch.tanh(self.always(x))
        if step % 3:
            x = x + torch.tanh(self.seldom(x))
        if rank == 0:
            x = x + torch.tanh(self.first(x))
        return self.head(x)


def run(model: nn.Module, rank: int, step: int) -> None:
    """A backward pass."""
    x, y = batch(rank, step)
    model.zero_grad()
    cross_entropy(model(x, rank, step), y).backward()


def unused() -> dict[str, Any]:
    """What was applied, against the mean of gradients less residuals, with each compressor; the largest difference."""
    return {name: _conserved(name) for name in ("topk", "adtopk", "none")}


def _conserved(compression: str) -> dict[str, float]:
    net, twin = seeded(Branches), seeded(Branches)
    model = DistributedDataParallel(net, find_unused_parameters=True, bucket_cap_mb=0.005)
    compressed = ddp.compress(
        model, compression=compression, **(OPTIONS if compression != "none" else {"merging": "single"})
    )
    given, applied = ([torch.zeros_like(p, dtype=torch.float64) for p in net.parameters()] for _ in range(2))
    still, left_alone = torch.optim.SGD(net.parameters(), lr=0.0), 0
    for step in range(STEPS):
        for module, forward, sums in ((twin, twin, given), (net, model, applied)):
            run(forward, agmerge.rank(), step)
            for total, p in zip(sums, module.parameters(), strict=True):
                total += 0 if p.grad is None else p.grad.double()
        still.step()
        left_alone += net.seldom.weight.grad is None
    kept = compressed.state_dict()["agmerge"]["residuals"]
    compressed.close()
    worst = 0.0
    for (name, _), mine, done in zip(net.named_parameters(), given, applied, strict=True):
        rest = kept.get(name, torch.zeros_like(mine)).double()
        worst = max(worst, float((agmerge.allreduce(mine - rest) - done).abs().max()))
    largest = max([float(residual.abs().max()) for residual in kept.values()], default=0.0)
    return {"worst": worst, "parameters that no rank used are not changed,": left_alone, "kept": largest}


def leaves_alone() -> dict[str, Any]:
    """Residuals and momenta of a layer that nobody uses, before and after passes without it."""
    net = seeded(Branches)
    model = DistributedDataParallel(net, find_unused_parameters=True)
    inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    compressed = ddp.compress(model, optimizer=inner, compression="dgc", **OPTIONS)

    def kept() -> list[str]:
        section = compressed.state_dict()["agmerge"]
        return [digest([section[kind][name]]) for kind in ("residuals", "momenta") for name in ("seldom.weight",)]

    found = []
    for step in (1, 2, 3, 6, 4):  # used, used, not, not, used
        run(model, agmerge.rank(), step)
        inner.step()
        found.append(kept())
    bias = digest([compressed.state_dict()["agmerge"]["averaged_momenta"]["seldom.bias"]])
    run(model, agmerge.rank(), 9)
    same = digest([compressed.state_dict()["agmerge"]["averaged_momenta"]["seldom.bias"]]) == bias
    compressed.close()
    return {"kept": found, "bias": same}


class Awkward(nn.Module):
    """What DistributedDataParallel can call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = AwkwardModel()

    def forward(self, data: tuple[Tensor, Tensor], rank: int, step: int) -> Tensor:
        """The loss."""
        return self.inner.loss(data, rank, step)


def awkward() -> list[str]:
    """Digests after each step of a model with tied, unused, alternating layers of mixed dtypes."""
    net = seeded(Awkward)
    model = DistributedDataParallel(net, find_unused_parameters=True, bucket_cap_mb=0.01)
    compressed = ddp.compress(model, compression="adtopk", check_every=1, **OPTIONS)
    inner = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    seen = []
    for step in range(STEPS // 2):
        inner.zero_grad()
        model(awkward_batch(agmerge.rank(), step), agmerge.rank(), step).backward()
        inner.step()
        seen.append(digest(net))
    compressed.close()
    return seen
