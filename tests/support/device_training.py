# SPDX-License-Identifier: Apache-2.0
"""Train on pretended devices with gradients that are known beforehand, and the same on the host."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from pretend import fused
from pretend.books import Books
from pretend.device import Device
from pretend.tensors import PLACE, DeviceTensor
from pretend.training import needs_own_thread, on_devices
from torch import Tensor, nn

import agmerge
import merging
from agmerge import testing

SHAPES = [(64, 48), (48,), (48, 64), (64,)]
PLAN = merging.Plan((2, 2))


@dataclass
class Trained:
    """What one rank has after its steps, on the host."""

    parameters: list[Tensor]
    residuals: dict[str, Tensor]  # by name of the parameter, of those that have one
    books: list[Books]  # of each step, of rank 0 all, of others waits alone; on the host none


def gradient(rank: int, step: int, number: int) -> Tensor:
    """The gradient of a rank for the parameter of that number."""
    source = torch.Generator().manual_seed(1000 * rank + 100 * step + number)
    return torch.randn(SHAPES[number], generator=source)


class Given(nn.Module):
    """Parameters of zeros, and a loss that gives them the gradients of a rank and step."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.given = nn.ParameterList(torch.zeros(shape, device=place) for shape in SHAPES)

    def forward(self, rank: int, step: int) -> Tensor:
        return loss(list(self.given), rank, step)


def loss(parameters: Sequence[Tensor], rank: int, step: int) -> Tensor:
    """What has these gradients."""
    given = [gradient(rank, step, number).to(p.device) for number, p in enumerate(parameters)]
    return torch.stack([(p * g).sum() for p, g in zip(parameters, given, strict=True)]).sum()


def same_residuals(device: Trained, host: Trained) -> bool:
    """Whether residuals are equal; small dense tensors have one on the host alone, where they may be rounded: zero."""
    own = device.residuals
    return own.keys() <= host.residuals.keys() and all(
        torch.equal(own[name], kept) if name in own else kept.numel() < 1024 and not kept.any()
        for name, kept in host.residuals.items()
    )


def plain_step(optimizer: Any, model: Given, rank: int, step: int) -> None:
    """One step as most scripts make it."""
    optimizer.zero_grad()
    model(rank, step).backward()
    optimizer.step()


def wrapped(model: Given, **options: Any) -> agmerge.DistributedOptimizer:
    """An optimizer that adds up updates: parameters become the negative sum of them."""
    inner = torch.optim.SGD(model.parameters(), lr=1.0, foreach=False)
    options = {"density": 0.05, "merging": PLAN, "timeout": 20.0, **options}
    if options["merging"] == "dear":
        options["model"] = model
    return agmerge.DistributedOptimizer(inner, model.named_parameters(), **options)


Each = Callable[[Any, Given, int, int], None]  # one step: optimizer, model, rank, step


def train(
    size: int,
    place: str = PLACE,
    *,
    steps: int = 4,
    each: Each = plain_step,
    leave_out: str = "",
    kernels: bool = False,
    **options: Any,
) -> list[Trained]:
    """``steps`` steps from zeros on every rank, with tensors on ``place``.

    ``leave_out``: see :class:`Device`. ``kernels``: devices have those of ``sparsifiers.gpu``.
    """

    def body(rank: int, device: Device | None = None) -> Trained:
        if device is not None:
            device.leave_out = leave_out
        model = Given(place)
        optimizer, books = wrapped(model, **options), []
        for step in range(steps):
            each(optimizer, model, rank, step)
            if device is not None:
                books.append(device.books.taken())
        residuals = testing.inspect(optimizer).residuals
        return Trained([host(p) for p in model.parameters()], {name: host(r) for name, r in residuals.items()}, books)

    with warnings.catch_warnings(), fused.installed() if kernels else nullcontext():
        warnings.simplefilter("ignore")
        if place == "cpu":
            return testing.run(size, body)
        own_thread = needs_own_thread(options.get("exchange", ""), options.get("compression", ""))
        return on_devices(size, body, own_thread=own_thread, watched={0})


def host(tensor: Tensor) -> Tensor:
    """What a tensor has, looked at from outside."""
    tensor = tensor.detach()
    return tensor.host if isinstance(tensor, DeviceTensor) else tensor
