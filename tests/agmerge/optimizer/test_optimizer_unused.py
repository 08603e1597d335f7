"""Parameters without a gradient: on some ranks, on all of them, in some steps, or for ever."""

from __future__ import annotations

import copy

import pytest
import torch
from support import (
    Parts,
    agreed,
    digest,
    on_ranks,
    residuals,
    same_bits,
    seeded,
    sgd,
    wrap,
)

WHOLE = ["none", "topk"]  # with density 1 they send all there is
COMPRESSIONS = [*WHOLE, "powersgd", "acpsgd"]
PARTS = seeded(Parts)


@pytest.mark.thin
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize(
    "use",
    [("a", ""), ("", "b"), ("ab", "a"), ("a", "b")],
    ids=["one unused on rank 1", "one unused on rank 0", "b on rank 0 only", "each its own"],
)
def test_unused_parameters_never_divide_replicas(use: tuple[str, str], compression: str, set_to_none: bool) -> None:
    def body(rank: int, model: Parts) -> list[str]:
        optimizer = wrap(model, sgd(model, weight_decay=0.1), compression=compression)
        seen = []
        for step in range(20):
            optimizer.zero_grad(set_to_none=set_to_none)
            model.loss(rank, step, use[(rank + step // 5) % 2]).backward()  # they change places now and then
            optimizer.step()
            seen.append(digest(model))
        return seen

    assert len(set(agreed(on_ranks(2, PARTS, body)))) == 20


@pytest.mark.thin
@pytest.mark.parametrize("compression", WHOLE)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_density_one_equals_a_dense_reference_with_rank_dependent_layers(size: int, compression: str) -> None:
    """A step moves what some rank has used in it, and nothing else."""
    uses = ["a", "b", "", "ab"]
    twin = copy.deepcopy(PARTS)
    single = sgd(twin, weight_decay=0.1)
    for step in range(20):
        single.zero_grad()
        (sum(twin.loss(rank, step, uses[(step + rank) % 4]) for rank in range(size)) / size).backward()
        single.step()

    def body(rank: int, model: Parts) -> Parts:
        optimizer = wrap(model, sgd(model, weight_decay=0.1), compression=compression, density=1.0)
        for step in range(20):
            optimizer.zero_grad()
            model.loss(rank, step, uses[(step + rank) % 4]).backward()
            optimizer.step()
        return model

    found = on_ranks(size, PARTS, body)
    agreed([digest(model) for model in found])
    for a, b in zip(found[0].parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_parameter_no_rank_used_has_no_gradient_or_on_request_zeros() -> None:
    def body(rank: int, model: Parts, unused: str) -> tuple[bool, list[bool]]:
        optimizer = wrap(model, sgd(model, weight_decay=0.1), compression="none", unused=unused)
        none = []
        for step in range(4):
            optimizer.zero_grad()
            model.loss(rank, step, "" if step == 0 else "a" if rank == 1 and step == 1 else "").backward()
            optimizer.step()
            none.append(model.a.weight.grad is None)
        return torch.equal(model.b.weight, PARTS.b.weight), none

    as_torch = agreed(on_ranks(2, PARTS, lambda r, m: body(r, m, "none")))
    as_horovod = agreed(on_ranks(2, PARTS, lambda r, m: body(r, m, "zero")))
    assert as_torch == (True, [True, False, True, True])
    assert as_horovod == (False, [False] * 4)  # weight decay moved it


def test_a_tensor_unused_in_a_step_still_offers_its_residual() -> None:
    def body(rank: int, model: Parts) -> list[float]:
        optimizer = wrap(model, dense=["trunk.*", "head.*", ".*bias"], merging="layerwise")
        left = []
        for step in range(60):
            optimizer.zero_grad()
            model.loss(rank, step, "a" if step == 0 else "").backward()
            optimizer.step()
            left.append(float(residuals(optimizer)["a.weight"].abs().sum()))
        return left

    for left in on_ranks(2, PARTS, body):
        assert left[0] > 0 and left[30] < 0.5 * left[0] and left[59] < left[30]


def test_frozen_parameters_are_not_moved_and_not_sent() -> None:
    def body(rank: int, model: Parts) -> int:
        optimizer = wrap(model, sgd(model, weight_decay=0.5))
        for step in range(5):
            optimizer.zero_grad()
            model.loss(rank, step, "ab").backward()
            optimizer.step()
        assert same_bits(model.a.weight, PARTS.a.weight) and model.a.weight.grad is None
        return sum(optimizer.plan.counts)

    frozen = copy.deepcopy(PARTS)
    frozen.a.requires_grad_(False)
    assert agreed(on_ranks(2, frozen, body)) == 6
