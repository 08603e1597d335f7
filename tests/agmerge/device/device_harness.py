"""Train on pretended devices with gradients that are known beforehand, and the same on the host."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pretend.books import Books
from pretend.device import Device
from pretend.tensors import PLACE, DeviceTensor
from pretend.training import on_devices
from torch import Tensor

import agmerge
import merging
from agmerge import testing

SHAPES = [(64, 48), (48,), (48, 64), (64,)]
PLAN = merging.Plan((2, 2))
# Exchanges that wait for other ranks in a hook: their hooks must come on the ranks' own threads.
WAITS_IN_HOOKS = ("oktopk", "masked", "two-level")


@dataclass
class Trained:
    """What one rank has after its steps, on the host."""

    parameters: list[Tensor]
    residuals: dict[str, Tensor]  # by name, of those that have one
    books: list[Books]  # of each step; on the host none


def gradient(rank: int, step: int, number: int) -> Tensor:
    """The gradient of a rank for the parameter of that number."""
    source = torch.Generator().manual_seed(1000 * rank + 100 * step + number)
    return torch.randn(SHAPES[number], generator=source)


def backward(parameters: Sequence[Tensor], rank: int, step: int) -> None:
    """Let autograd give every parameter its gradient."""
    given = [gradient(rank, step, number).to(p.device) for number, p in enumerate(parameters)]
    sum((p * g).sum() for p, g in zip(parameters, given, strict=True)).backward()  # type: ignore[union-attr]


def plain_steps(optimizer: Any, parameters: Sequence[Tensor], rank: int, step: int) -> None:
    """One step as most scripts make it."""
    optimizer.zero_grad()
    backward(parameters, rank, step)
    optimizer.step()


def wrapped(parameters: Sequence[Tensor], **options: Any) -> agmerge.DistributedOptimizer:
    """An optimizer that adds up updates: parameters become the negative sum of them."""
    inner = torch.optim.SGD(parameters, lr=1.0, foreach=False)
    named = [(str(number), p) for number, p in enumerate(parameters)]
    return agmerge.DistributedOptimizer(inner, named, **{"density": 0.05, "merging": PLAN, "timeout": 20.0, **options})


def train(
    size: int,
    place: str = PLACE,
    *,
    steps: int = 4,
    each: Callable[[Any, Sequence[Tensor], int, int], None] = plain_steps,
    leave_out: str = "",
    **options: Any,
) -> list[Trained]:
    """``steps`` steps from zeros on every rank, with tensors on ``place``. ``leave_out``: see :class:`Device`."""

    def body(rank: int, device: Device | None = None) -> Trained:
        if device is not None:
            device.leave_out = leave_out
        parameters = [torch.nn.Parameter(torch.zeros(shape, device=place)) for shape in SHAPES]
        optimizer, books = wrapped(parameters, **options), []
        for step in range(steps):
            each(optimizer, parameters, rank, step)
            if device is not None:
                books.append(device.books.taken())
        residuals = testing.inspect(optimizer).residuals
        return Trained([host(p) for p in parameters], {name: host(r) for name, r in residuals.items()}, books)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if place == "cpu":
            return testing.run(size, body)
        return on_devices(size, body, own_thread=options.get("exchange") in WAITS_IN_HOOKS)


def host(tensor: Tensor) -> Tensor:
    """What a tensor has, looked at from outside."""
    tensor = tensor.detach()
    return tensor.host if isinstance(tensor, DeviceTensor) else tensor
