# SPDX-License-Identifier: Apache-2.0
"""Parameters without a gradient: on some ranks, on all of them, in some steps, or for ever."""

from __future__ import annotations

import copy
import itertools

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
from torch import Tensor

import agmerge

WHOLE = ["none", "topk"]  # with density 1 they send all there is
COMPRESSIONS = [*WHOLE, "powersgd", "acpsgd", "eden"]
PARTS = seeded(Parts)


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


@pytest.mark.parametrize("merging", ["threshold", "dear"])
def test_what_one_rank_alone_has_left_reaches_all_where_nobody_uses_the_tensor(merging: str) -> None:
    """Load a checkpoint of rank 0's there, and let all go on dense."""

    def body(rank: int, model: Parts) -> tuple[str, bool]:
        optimizer = wrap(model, sgd(model, momentum=0.0))
        for step in range(3):
            optimizer.zero_grad()
            model.loss(rank, step, "a").backward()
            optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.close()
        given = {"merging": merging, **({"model": model} if merging == "dear" else {})}
        named, inner = model.named_parameters(), sgd(model, momentum=0.0)
        optimizer = agmerge.DistributedOptimizer(inner, named, compression="none", **given)  # type: ignore[arg-type]
        if rank == 0:
            optimizer.load_state_dict(state)
        before = model.a.weight.detach().clone()
        for step in range(3):
            optimizer.zero_grad()
            model.loss(rank, step, "").backward()
            optimizer.step()
        optimizer.flush()
        return digest(model), same_bits(model.a.weight, before)

    assert not agreed(on_ranks(2, PARTS, body))[1]


@pytest.mark.parametrize("compression", ["topk", "dgc"])
@pytest.mark.parametrize("wire", ["auto", "fp32", "int8"])
def test_what_is_sent_whole_and_no_rank_used_stays_with_all_that_is_kept_of_it(wire: str, compression: str) -> None:
    """Momentum of averages, the optimizer's own momentum and what rounding has left wait for the next gradient."""
    uses = ["a", "a", "a", "", "", "", "a", "a"]

    def body(rank: int, model: Parts) -> list[tuple[bool, list[Tensor]]]:
        optimizer = wrap(model, compression=compression, wire=wire)
        found = []
        for step, use in enumerate(uses):
            before = model.a.bias.detach().clone()
            optimizer.zero_grad()
            model.loss(rank, step, use).backward()
            optimizer.step()
            assert (model.a.bias.grad is None) is (not use)
            section = optimizer.state_dict()["agmerge"]
            kept = [section[kind]["a.bias"] for kind in ("residuals", "averaged_momenta") if "a.bias" in section[kind]]
            found.append((same_bits(model.a.bias, before), kept))
        return found

    for found in on_ranks(2, PARTS, body):
        assert [stayed for stayed, _ in found] == [not use for use in uses]
        last = found[2][1]  # of the last step that used it
        assert len(last) == (wire != "fp32") + (compression == "dgc")
        assert wire == "fp32" or bool(last[0].any()) is (wire == "int8")
        for _, kept in found[3:6]:
            assert all(same_bits(now, then) for now, then in zip(kept, last, strict=True))


@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_a_gradient_of_zeros_lets_momentum_of_averages_fade(wire: str) -> None:
    """Move 0.9 times as far in each step as in the one before, as an optimizer does that is given zeros."""

    def body(rank: int, model: Parts) -> list[Tensor]:
        optimizer = wrap(model, compression="dgc", wire=wire, unused="zero")
        moves = []
        for step in range(7):
            before = model.a.bias.detach().clone()
            optimizer.zero_grad()
            model.loss(rank, step, "a" if step < 3 else "").backward()
            optimizer.step()
            moves.append(model.a.bias.detach() - before)
        return moves

    for moves in on_ranks(2, PARTS, body):
        largest = float(moves[2].abs().max())
        assert largest > 0
        for before, after in itertools.pairwise(moves[2:]):
            # What rounding has left is applied: half a 127th of the largest value of a block, of several tensors.
            torch.testing.assert_close(
                after, 0.9 * before, rtol=1e-4, atol=largest * (1e-6 if wire == "fp32" else 0.05)
            )


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
