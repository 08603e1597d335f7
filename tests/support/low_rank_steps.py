# SPDX-License-Identifier: Apache-2.0
"""Steps of low-rank exchanges on in-memory ranks; tests/references has the same without the library.

What is checked is what a script can see: gradients, updates, and what is kept by kind and name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agmerge import testing
from agmerge.exchanges.low_rank.bases import initial_basis
from agmerge.step.gradient_exchange import GradientExchange
from support.gradient_exchange import Table, connected, updates_of

NAMES = ("powersgd", "acpsgd")
SHAPES: Mapping[str, tuple[int, ...]] = {
    "conv": (16, 8, 3, 3),
    "wide": (18, 100),
    "bias": (64,),
    "tall": (96, 20),
    "square": (40, 40),
}
MATRICES = tuple(name for name, shape in SHAPES.items() if len(shape) > 1)
LEFT, RIGHT = "left basis", "right basis"  # kinds of what is kept
CONTROL = 24  # numbers behind those of a message, besides one for each of its tensors

Tensors = Mapping[str, "Tensor | None"]
GradientsOf = Callable[[int, int], Tensors]  # of a rank in a step


@dataclass
class Step:
    """What one rank saw of one step, by name, all copies. ``bases``: as of its end, each with its kind."""

    gradients: dict[str, Tensor]
    updates: dict[str, Tensor | None]
    residuals: dict[str, Tensor]
    bases: dict[str, tuple[str, Tensor]]

    def update(self, name: str) -> Tensor:
        """The update of a tensor that has one."""
        update = self.updates[name]
        assert update is not None
        return update


def drawn(rank: int, step: int, dtype: torch.dtype = torch.float64, shapes: Any = SHAPES) -> dict[str, Tensor]:
    """What a rank has in a step: a part that stays, one of low rank, and noise; of all ranks alike in their sizes."""
    source = torch.Generator().manual_seed(7 + 1000 * step + rank)
    fixed = torch.Generator().manual_seed(7 + rank)
    gradients = {}
    for name, shape in shapes.items():
        n, m = shape[0], math.prod(shape[1:])
        thin = torch.randn(n, 1, generator=source, dtype=torch.float64) @ torch.randn(1, m, generator=source).double()
        whole = 0.5 * torch.randn(n, m, generator=fixed, dtype=torch.float64) + thin
        whole += 0.5 * torch.randn(n, m, generator=source, dtype=torch.float64)
        gradients[name] = whole.view(shape).to(dtype)
    return gradients


def kept(exchange: GradientExchange) -> tuple[dict[str, Tensor], dict[str, tuple[str, Tensor]]]:
    """Copies of residuals and bases, by name."""
    state = {key: tensor.clone() for key, tensor in exchange.agreed.current.tensors.items()}
    residuals = {name: tensor for (kind, name), tensor in state.items() if kind == "residual"}
    return residuals, {name: (kind, tensor) for (kind, name), tensor in state.items() if kind in (LEFT, RIGHT)}


def made(exchange: GradientExchange, gradients: Tensors) -> Step:
    """Make one step, and say what there is to see of it."""
    given = {name: tensor.clone() for name, tensor in gradients.items() if tensor is not None}
    for name, tensor in gradients.items():
        exchange.ready(name, tensor)
    updates = updates_of(exchange.finish())
    exchange.commit()
    return Step(given, updates, *kept(exchange))


def opened(tensors: Mapping[str, Tensor], compression: Any = "powersgd", **options: Any) -> GradientExchange:
    """An exchange that compresses all that can be smaller. Of tensors of these shapes, dtypes and strides."""
    options = {"dense": [], "merging": "threshold", **options}
    return connected(Table(tensors), compression=compression, **options)


def steps_of(size: int, gradients_of: GradientsOf, steps: int, **options: Any) -> list[list[Step]]:
    """All steps, by rank. Gradients of step 0 say what the tensors are."""

    def body(rank: int) -> list[Step]:
        tensors = {name: torch.zeros_like(tensor) for name, tensor in gradients_of(0, 0).items() if tensor is not None}
        exchange = opened(tensors, **options)
        return [made(exchange, gradients_of(rank, step)) for step in range(steps)]

    return testing.run(size, body)


def mean(tensors: Sequence[Tensor]) -> Tensor:
    """The mean, in float64."""
    return torch.stack([tensor.double() for tensor in tensors]).mean(0)


def matrix(tensor: Tensor) -> Tensor:
    """A tensor as the matrix that is factorised, in float64."""
    return tensor.double().reshape(len(tensor), -1)


def distance(a: Tensor, b: Tensor) -> float:
    """How far ``a`` is from ``b``, relative to ``b``."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def accumulated(seen: Sequence[Step], step: int, name: str) -> Tensor:
    """What a rank had before it sent anything in a step: residual and gradient, in float64."""
    gradient = seen[step].gradients[name].double()
    before = seen[step - 1].residuals.get(name) if step else None
    return gradient if before is None else gradient + before.double()


def overlap(residual: Tensor, update: Tensor, sent_left: bool) -> float:
    """How much of a residual lies in the space that an update is of: 0 where all of that was sent; at most 1.

    ``sent_left``: the update is the left factor times a right basis, so that its rows lie in that; else its columns do.
    """
    rest, whole = matrix(residual), matrix(update)
    product = rest @ whole.T if sent_left else whole.T @ rest
    return float(product.norm() / (rest.norm() * whole.norm()))


def first_basis(name: str, shape: Sequence[int], rank: int, seed: int = 0) -> Tensor:
    """The columns, (m, r) in float64, that a training begins with, which depend on these alone."""
    m = math.prod(shape[1:])
    return initial_basis(seed, name, m, min(rank, shape[0], m)).T.double()
