# SPDX-License-Identifier: Apache-2.0
"""What tests of low-rank compressors share: books of what went in, came out and is kept, and what bases must be."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import agmerge
from support import agreed, digest, loss_of, on_ranks, residuals, sgd, wrap

LOW_RANK = ["powersgd", "acpsgd"]
# Relative to the norm of all gradients: some hundred roundings of float32. A factor that is lost is 1e-2 or more.
ROUNDED = 2e-5
Loss = Callable[[Any, int, int], Tensor]


def bases(optimizer: agmerge.DistributedOptimizer) -> dict[tuple[str, str], Tensor]:
    """What is kept from step to step beside residuals, by side and name of the tensor."""
    section = optimizer.state_dict()["agmerge"]
    return {(side, name): rows for side in ("left", "right") for name, rows in section[f"{side}_bases"].items()}


def assert_bases_are_orthonormal(kept: dict[tuple[str, str], Tensor]) -> None:
    for key, rows in kept.items():
        square = rows.double() @ rows.double().t()
        assert torch.allclose(square, torch.eye(len(rows), dtype=torch.float64), atol=1e-5), key


class Books:
    """What one rank has handed in, and what it got back, by name in float64."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.given, self.taken, self.magnitude = (
            {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()} for _ in range(3)
        )

    def give(self) -> None:
        """Enter the gradients, after backward."""
        for name, p in self.model.named_parameters():
            if p.grad is not None:
                self.given[name] += p.grad
                self.magnitude[name] += p.grad.abs()

    def take(self) -> None:
        """Enter the updates, after ``synchronize()``."""
        for name, p in self.model.named_parameters():
            if p.grad is not None:
                self.taken[name] += p.grad

    def step(self, optimizer: Any) -> None:
        """Enter the gradients that are there, exchange them, and enter what came back."""
        self.give()
        optimizer.synchronize()
        self.take()
        with optimizer.skip_synchronize():
            optimizer.step()


def assert_nothing_is_lost(
    ranks: list[tuple[Books, dict[str, Tensor]]], summed: bool = False, rounded: float = ROUNDED
) -> None:
    """Updates and residuals are the gradients, over all ranks. ``ranks``: the books and final residuals of each."""
    weight = 1 if summed else len(ranks)
    moved = False
    for name, taken in ranks[0][0].taken.items():
        given = sum(books.given[name] for books, _ in ranks)
        kept = sum(left.get(name, torch.zeros(())).double() for _, left in ranks)
        size = sum(books.magnitude[name] for books, _ in ranks).norm()
        assert (weight * taken + kept - given).norm() <= rounded * size, name
        moved |= bool(taken.any())
    assert moved


def run(
    size: int,
    model: nn.Module,
    steps: Iterable[int],
    loss: Loss = loss_of,
    inner: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: sgd(model, lr=0.05),
    before: Callable[[Any, int, int], None] = lambda model, rank, step: None,
    **options: Any,
) -> None:
    """Train; replicas and bases are equal to the bit after each step, and nothing is lost."""

    def body(rank: int, model: nn.Module) -> Any:
        optimizer, books, seen = wrap(model, inner(model), **options), Books(model), []
        for step in steps:
            before(model, rank, step)
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            books.step(optimizer)
            kept = bases(optimizer)
            assert_bases_are_orthonormal(kept)
            seen.append((digest(model), sorted(kept), digest(kept[key] for key in sorted(kept))))
        return seen, (books, residuals(optimizer))

    found = on_ranks(size, model, body)
    seen = agreed([one for one, _ in found])
    assert seen[-1][1] and len({bits for bits, *_ in seen}) == len(seen)
    rounded = {"fp16": 3e-3, "bf16": 2e-2}.get(str(options.get("wire")), ROUNDED)
    assert_nothing_is_lost([kept for _, kept in found], options.get("op") is agmerge.Sum, rounded)
