# SPDX-License-Identifier: Apache-2.0
"""What published code gets wrong: for each defect its rule in a few lines, a predicate that it fails, and ours.

The rules are written from descriptions of the ACP-SGD code, the PowerSGD package and torch's communication hook.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.low_rank_steps import (
    NAMES,
    mean,
    opened,
    steps_of,
)
from torch import Tensor

from agmerge import testing

both = pytest.mark.parametrize("name", NAMES)


N, M, RANK = 48, 32, 4


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthonormal(columns: Tensor) -> Tensor:
    return torch.linalg.qr(columns).Q


class PublishedPowerSGD:
    """All ranks of one matrix, (N, M), in float64, as torch's hook and the research code do it.

    What a rank keeps is what it had, less the update of all.
    """

    def __init__(self, ranks: int) -> None:
        self.basis = normal(99, M, RANK)
        self.residuals = [torch.zeros(N, M, dtype=torch.float64)] * ranks

    def step(self, gradients: Sequence[Tensor]) -> Tensor:
        whole = [residual + gradient for residual, gradient in zip(self.residuals, gradients, strict=True)]
        left = orthonormal(mean([d @ orthonormal(self.basis) for d in whole]))
        self.basis = mean([d.T @ left for d in whole])
        update = left @ self.basis.T
        self.residuals = [d - update for d in whole]
        return update


class PublishedACPSGD:
    """One rank of ACP-SGD on one matrix, as published. ``seed``: of torch's own generator, which draws both factors."""

    def __init__(self, seed: int = 0) -> None:
        self.left, self.right = normal(seed, N, RANK), normal(seed + 1, M, RANK)
        self.residual, self.sends_left = torch.zeros(N, M, dtype=torch.float64), True

    def compress(self, gradient: Tensor) -> Tensor:
        """What a hook does: the factor to be added up. The residual changes at once."""
        whole = self.residual + gradient
        if self.sends_left:
            self.right = orthonormal(self.right)
            self.left = whole @ self.right
        else:
            self.left = orthonormal(self.left)
            self.right = whole.T @ self.left
        self.residual = whole - self.left @ self.right.T
        return self.left if self.sends_left else self.right

    def step(self, total: Tensor, ranks: int = 1) -> Tensor:
        """The update, of the sum of all factors."""
        self.left, self.right = (total, self.right) if self.sends_left else (self.left, total)
        self.sends_left = not self.sends_left
        return self.left @ self.right.T / ranks


def ours(name: str, gradients: Sequence[Sequence[Tensor]], **options: Any) -> list[list[Any]]:
    """Our steps by rank, of gradients by rank and step of one matrix "a"."""
    return steps_of(
        len(gradients), lambda rank, step: {"a": gradients[rank][step]}, len(gradients[0]), compression=name, **options
    )


# -- residuals of the aggregate ---------------------------------------------------------------------------------------


@pytest.mark.long
@both
def test_residuals_drift_where_the_update_of_all_is_taken_off(name: str) -> None:
    """With gradients whose means differ from rank to rank: torch's hook, the research code, hivemind."""
    fixed = [2 * normal(rank, N, M) for rank in range(2)]

    def gradient(rank: int, step: int) -> Tensor:
        return fixed[rank] + normal(10 + 2 * step + rank, N, M)

    def grows(norms: Sequence[float]) -> bool:
        return norms[999] > 2 * norms[99]

    rule, published = PublishedPowerSGD(2), []
    for step in range(1000):
        rule.step([gradient(rank, step) for rank in range(2)])
        published.append(float(rule.residuals[0].norm()))
    assert grows(published) and published[999] > 8 * published[99]

    def body(rank: int) -> list[float]:
        exchange, norms = opened({"a": torch.zeros(N, M)}, name), []
        for step in range(1000):
            exchange.ready("a", gradient(rank, step).float())
            exchange.finish()
            exchange.commit()
            residual = exchange.agreed.residual_of("a")
            assert residual is not None
            norms.append(float(residual.norm()))
        return norms

    assert not any(grows(norms) for norms in testing.run(2, body))


# -- starts -----------------------------------------------------------------------------------------------------------


def test_bases_drawn_from_the_scripts_generator_part_ranks_that_are_seeded_differently() -> None:
    """As they should be, to load other data. Ours does not ask torch's generator, nor moves it."""

    def apart(updates: Sequence[Tensor]) -> bool:
        return any(not torch.equal(update, updates[0]) for update in updates)

    rules = [PublishedACPSGD(seed) for seed in (1, 5)]
    total = sum(rule.compress(normal(rank, N, M)) for rank, rule in enumerate(rules))
    assert apart([rule.step(total, 2) for rule in rules])
    gradients = [[normal(rank, N, M)] for rank in range(2)]
    for name in NAMES:
        first = []
        for seed in (1, 5):
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            first += [of_rank[0].update("a") for of_rank in ours(name, gradients)]
            assert torch.equal(torch.get_rng_state(), before)
        assert not apart(first)


# -- steps out of the ordinary ----------------------------------------------------------------------------------------
