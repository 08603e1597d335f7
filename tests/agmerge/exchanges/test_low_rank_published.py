# SPDX-License-Identifier: Apache-2.0
"""What published code gets wrong: for each defect its rule in a few lines, a predicate that it fails, and ours.

The rules are written from descriptions of the ACP-SGD code, the PowerSGD package and torch's communication hook.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import agreed, digest, loss_of, mlp, on_ranks, residuals, seeded, through_a_file, wrap
from support.low_rank_steps import (
    NAMES,
    distance,
    kept,
    made,
    mean,
    opened,
    overlap,
    steps_of,
)
from torch import Tensor, nn

import agmerge
from agmerge import testing

both = pytest.mark.parametrize("name", NAMES)
MODEL = seeded(mlp)
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


@both
def test_what_is_left_is_orthogonal_to_what_was_sent(name: str) -> None:
    gradients = [[normal(100 * rank + step, N, M) for step in range(4)] for rank in range(2)]
    rule = PublishedPowerSGD(2)
    for step in range(4):
        update = rule.step([of_rank[step] for of_rank in gradients])
    assert overlap(rule.residuals[0], update, False) > 0.01
    for of_rank in ours(name, gradients):
        assert min(overlap(of_rank[3].residuals["a"], of_rank[3].update("a"), side) for side in (False, True)) < 1e-13


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


def test_two_random_factors_lose_the_first_updates() -> None:
    """A first step of both factors does not: gradients of rank 3, with factors of 4."""
    thin = [normal(1, N, 3) @ normal(2, 3, M)] * 3
    rule = PublishedACPSGD()
    lost = [distance(rule.step(rule.compress(gradient)), gradient) for gradient in thin]
    assert min(lost[:2]) > 0.5
    for name in NAMES:
        assert max(distance(one.update("a"), thin[0]) for one in ours(name, [thin], rank=RANK)[0]) < 1e-12


# -- steps out of the ordinary ----------------------------------------------------------------------------------------


@both
def test_an_unused_layer_gets_no_garbage(name: str) -> None:
    """The published buffer of it never fills, nothing is added up, and its random factors are its gradient."""
    rule = PublishedACPSGD()
    assert rule.step(rule.left).norm() > 10  # no hook has come by

    def body(rank: int, model: nn.Module) -> tuple[Tensor | None, str]:
        model.unused = nn.Linear(48, 48)
        agmerge.broadcast_parameters(model.state_dict(), root_rank=0)
        before = digest(model.unused)
        optimizer = wrap(model, compression=name, merging="single")
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model[:5], rank, step).backward()
            optimizer.step()
        assert digest(model.unused) == before
        return model.unused.weight.grad, digest(model)

    found = on_ranks(2, MODEL, body)
    assert [gradient for gradient, _ in found] == [None, None]
    agreed([bits for _, bits in found])


@both
def test_passes_that_are_accumulated_count_once(name: str) -> None:
    """Published hooks compress in each pass what has come together so far: the first part enters the residual twice."""
    parts = [normal(1, N, M), normal(2, N, M)]

    def lost(update: Tensor, residual: Tensor) -> float:
        return distance(update + residual, parts[0] + parts[1])

    rule, gradient = PublishedACPSGD(), torch.zeros(N, M, dtype=torch.float64)
    for part in parts:
        gradient = gradient + part
        factor = rule.compress(gradient)
    assert lost(rule.step(factor), rule.residual) > 0.3

    def body(rank: int) -> tuple[Tensor, Tensor]:
        weight = nn.Parameter(torch.zeros(N, M, dtype=torch.float64))
        inner = torch.optim.SGD([weight], lr=1.0)
        options: dict[str, Any] = {"compression": name, "exchange": "sparse", "backward_passes_per_step": 2}
        optimizer = agmerge.DistributedOptimizer(inner, [("a", weight)], **options)
        for part in parts:
            (weight * part).sum().backward()
        optimizer.step()
        return -weight.detach(), residuals(optimizer)["a"]

    for update, residual in testing.run(2, body):
        assert lost(update, residual) < 1e-13


@both
def test_one_infinite_gradient_is_forgotten(name: str) -> None:
    """It enters a published residual before anybody looks: then nothing is finite for ever."""
    gradients = [normal(step, N, M) for step in range(4)]
    gradients[1][3, 4] = torch.inf

    broken = PublishedACPSGD()
    broken.compress(gradients[1])
    assert not torch.isfinite(broken.residual).all() and not torch.isfinite(broken.residual + gradients[2]).all()

    def body(rank: int) -> list[tuple[Tensor, Tensor]]:
        exchange, seen = opened({"a": gradients[0]}, name, nonfinite="skip"), []
        for step in range(4):
            own = gradients[step] if rank == 0 else normal(50 + step, N, M)
            exchange.ready("a", own)
            combined = exchange.finish()
            assert combined.skipped == (step == 1)
            if combined.skipped:
                exchange.discard()
                continue
            update = combined.updates["a"]
            assert update is not None
            seen.append(update.clone())
            exchange.commit()
        return [(update, kept(exchange)[0]["a"]) for update in seen]

    for of_rank in testing.run(2, body):
        assert all(torch.isfinite(update).all() and torch.isfinite(residual).all() for update, residual in of_rank)


@pytest.mark.parametrize("rank", [1, 2])
@both
def test_a_layer_whose_first_gradient_is_zero_learns_later(name: str, rank: int) -> None:
    """torch's hook divides by the length of a column at these ranks: NaN for ever. An embedding may begin so."""

    def divided(columns: Tensor) -> Tensor:
        columns = columns.clone()
        for k in range(columns.shape[1]):
            columns[:, k] /= columns[:, k].norm()
            columns[:, k + 1 :] -= columns[:, k : k + 1] * (columns[:, k : k + 1].T @ columns[:, k + 1 :])
        return columns

    gradients = [torch.zeros(N, M, dtype=torch.float64), *(normal(step, N, M) for step in range(3))]
    basis, finite = normal(99, M, rank), []
    for gradient in gradients:
        left = divided(gradient @ divided(basis))
        basis = gradient.T @ left
        finite.append(bool(torch.isfinite(left @ basis.T).all()))
    assert not any(finite)
    for of_step, gradient in zip(ours(name, [gradients] * 2, rank=rank)[1], gradients, strict=True):
        assert torch.isfinite(of_step.update("a")).all()
        assert of_step.update("a").any() == gradient.any()


@both
def test_a_restart_goes_on_where_it_was(name: str) -> None:
    """Published states have neither factors nor residuals nor phase: what follows is another training."""
    gradients = [normal(step, N, M) for step in range(6)]

    def published(restarts: bool) -> list[Tensor]:
        rule, updates = PublishedACPSGD(), []
        for step, gradient in enumerate(gradients):
            if restarts and step == 3:
                rule = PublishedACPSGD(seed=8)
            updates.append(rule.step(rule.compress(gradient)))
        return updates

    def library(restarts: bool) -> list[Tensor]:
        def body(rank: int) -> list[Tensor]:
            exchange, updates = opened({"a": gradients[0]}, name), []
            for step, gradient in enumerate(gradients):
                if restarts and step == 3:
                    now = exchange.agreed.current.copied()
                    exchange = opened({"a": gradients[0]}, name)
                    exchange.restore(replace(now, tensors=through_a_file(now.tensors)), 3, None)
                updates.append(made(exchange, {"a": gradient}).update("a"))
            return updates

        return testing.run(2, body)[0]

    assert digest(published(True)) != digest(published(False))
    assert digest(library(True)) == digest(library(False))


@both
def test_zero_grad_at_any_time_loses_nothing(name: str) -> None:
    """The package parks what is left in ``p.grad``, where a script makes it zero."""
    parked = normal(1, N, M)
    weight = nn.Parameter(torch.zeros(N, M, dtype=torch.float64))
    weight.grad = parked.clone()
    torch.optim.SGD([weight], lr=0.1).zero_grad()
    assert weight.grad is None

    def body(rank: int, model: nn.Module, often: bool) -> list[str]:
        optimizer, seen = wrap(model, compression=name), []
        for step in range(4):
            for _ in range(3 if often else 1):
                optimizer.zero_grad(set_to_none=not often)
            loss_of(model, rank, step).backward()
            optimizer.step()
            if often:
                model.zero_grad()
            seen.append(digest(model) + digest(residuals(optimizer).values()))
        return seen

    assert on_ranks(2, MODEL, lambda r, m: body(r, m, True)) == on_ranks(2, MODEL, lambda r, m: body(r, m, False))
