# SPDX-License-Identifier: Apache-2.0
"""What is kept survives a restart, another rank and another compressor: to the bit, where nothing differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import agreed, digest, loss_of, mlp, on_ranks, residuals, seeded, sgd, through_a_file, wrap
from support.low_rank_steps import (
    LEFT,
    MATRICES,
    NAMES,
    RIGHT,
    SHAPES,
    Step,
    distance,
    drawn,
    made,
    mean,
    opened,
)
from torch import Tensor, nn

from agmerge import testing
from agmerge.step.gradient_exchange import GradientExchange

both = pytest.mark.parametrize("name", NAMES)
MODEL = seeded(mlp)


def single(rank: int, step: int) -> dict[str, Tensor]:
    return drawn(rank, step, torch.float32)


def new(name: str, **options: Any) -> GradientExchange:
    return opened({tensor: torch.zeros(shape) for tensor, shape in SHAPES.items()}, name, **options)


def common_bits(step: Step) -> list[str]:
    """Of what is the same on all ranks."""
    return [
        digest(update for update in step.updates.values() if update is not None),
        digest(basis for _, basis in step.bases.values()),
        *(side for side, _ in step.bases.values()),
    ]


# -- restarts ---------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("at", [0, 1, 2, 3], ids="after step {}".format)
@pytest.mark.parametrize("options", [{}, {"memory": "none"}, {"wire": "bf16"}], ids=str)
def test_a_training_goes_on_from_any_phase_to_the_bit(name: str, at: int, options: dict[str, str]) -> None:
    """Through a file, into new models and optimizers."""

    def go(model: nn.Module, optimizer: Any, rank: int, steps: range) -> list[str]:
        seen = []
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            seen.append(digest(model))
        return seen

    def whole(rank: int, model: nn.Module) -> list[str]:
        return go(model, wrap(model, compression=name, rank=2, **options), rank, range(7))

    def cut(rank: int, model: nn.Module) -> list[str]:
        optimizer = wrap(model, compression=name, rank=2, **options)
        seen = go(model, optimizer, rank, range(at + 1))
        saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        optimizer.close()
        other = mlp()  # other numbers
        other.load_state_dict(saved["model"])
        resumed = wrap(other, sgd(other), compression=name, rank=2, **options)
        resumed.load_state_dict(saved["optimizer"])
        return seen + go(other, resumed, rank, range(at + 1, 7))

    assert agreed(on_ranks(2, MODEL, cut)) == agreed(on_ranks(2, MODEL, whole))


@both
def test_bases_are_taken_from_rank_0_where_others_have_not_loaded_them(name: str) -> None:
    """Replicas stay equal, whatever a rank has brought along."""

    def body(rank: int) -> list[list[str]]:
        exchange = new(name)
        for step in range(3):
            made(exchange, single(rank, step))
        carried = exchange.agreed.current.copied()
        if rank == 1:
            carried.tensors = {key: tensor for key, tensor in carried.tensors.items() if key[0] == "residual"}
        again = new(name)
        again.restore(carried, exchange.agreed.steps, None)
        seen = [made(again, single(rank, step)) for step in range(3, 6)]
        return [common_bits(one) for one in seen]

    def undisturbed(rank: int) -> list[list[str]]:
        exchange = new(name)
        seen = [made(exchange, single(rank, step)) for step in range(6)]
        return [common_bits(one) for one in seen[3:]]

    assert agreed(testing.run(2, body)) == agreed(testing.run(2, undisturbed))


@both
def test_bases_of_another_rank_are_drawn_anew_and_residuals_stay(name: str) -> None:
    def body(rank: int) -> tuple[Step, Step]:
        before = new(name, rank=4)
        seen = [made(before, single(rank, step)) for step in range(2)]
        after = new(name, rank=2)
        after.restore(before.agreed.current.copied(), before.agreed.steps, None)
        return seen[-1], made(after, single(rank, 2))

    seen = testing.run(2, body)
    for tensor in MATRICES:
        there_was = mean([old.residuals[tensor] + new_one.gradients[tensor] for old, new_one in seen])
        rest = mean([new_one.residuals[tensor] for _, new_one in seen])
        assert distance(seen[0][1].update(tensor) + rest, there_was) < 1e-6
        assert len(seen[0][1].bases[tensor][1]) == 2


# -- other compressors ------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("other", ["topk", "powersgd", "acpsgd", "none"])
def test_another_compressor_goes_on_with_what_is_left(name: str, other: str) -> None:
    """Residuals are carried over, in both directions; in float64 nothing is lost."""
    model = seeded(mlp).double()

    def body(rank: int, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        optimizer = wrap(
            model, torch.optim.SGD(model.parameters(), lr=0.1), compression=name, rank=2, dense_sum="ordered"
        )
        updates = {key: torch.zeros_like(p) for key, p in model.named_parameters()}
        own = {key: torch.zeros_like(p) for key, p in model.named_parameters()}
        for step in range(9):
            if step in (3, 6):
                optimizer.set_compressor(other if step == 3 else name)
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            for key, p in model.named_parameters():
                own[key] += p.grad
            optimizer.synchronize()
            for key, p in model.named_parameters():
                updates[key] += p.grad
            with optimizer.skip_synchronize():
                optimizer.step()
        return own, updates, residuals(optimizer)

    seen = on_ranks(2, model, body)
    for key, update in seen[0][1].items():
        zero = torch.zeros_like(update)
        rest = mean([kept.get(key, zero) for *_, kept in seen])
        assert distance(update + rest, mean([own[key] for own, *_ in seen])) < 1e-12, key


@both
def test_sides_are_kept_by_kind_and_name(name: str) -> None:
    """What a checkpoint has of them: one basis a tensor."""

    def body(rank: int) -> dict[tuple[str, str], tuple[int, ...]]:
        exchange = new(name, rank=2)
        for step in range(2):
            made(exchange, single(rank, step))
        return {
            key: tuple(tensor.shape) for key, tensor in exchange.agreed.current.tensors.items() if key[0] != "residual"
        }

    shapes = agreed(testing.run(2, body))
    assert {tensor for _, tensor in shapes} == set(MATRICES) and len(shapes) == len(MATRICES)
    assert {kind for kind, _ in shapes} <= {LEFT, RIGHT}
