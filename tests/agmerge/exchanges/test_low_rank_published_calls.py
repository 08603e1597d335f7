# SPDX-License-Identifier: Apache-2.0
"""What published code gets wrong of shapes, dtypes and calls: its rule, a predicate that it fails, and ours.

As in `test_low_rank_published.py`, which has what is wrong with its steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import agreed, digest, loss_of, mlp, on_ranks, seeded, sgd, train, wrap
from support.low_rank_steps import NAMES, accumulated, distance, made, matrix, mean, opened, steps_of
from torch import Tensor, nn

import agmerge
from agmerge import testing

both = pytest.mark.parametrize("name", NAMES)
MODEL = seeded(mlp)
N, M, RANK = 48, 32, 4


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- shapes and dtypes ------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("count", [1, 2, 8])
def test_at_rank_1_each_vector_has_a_length_of_its_own(name: str, count: int) -> None:
    """The package divides those of all matrices of a shape by one common length: with two of them it is wrong.

    Constant gradients of rank 1.
    """
    gradients = torch.stack([normal(2 * k, N, 1) @ normal(2 * k + 1, 1, M) for k in range(count)])

    def wrong(updates: Tensor) -> bool:
        return distance(updates, gradients) > 0.1

    left, right, residual = torch.stack([normal(50 + k, N, 1) for k in range(count)]), None, torch.zeros_like(gradients)
    for step in range(6):  # one-sided steps in turn
        whole = residual + gradients
        if right is not None and step % 2:
            right = right / right.norm()
            left = whole @ right
        else:
            left = left / left.norm()
            right = whole.transpose(1, 2) @ left
        update = left @ right.transpose(1, 2)
        residual = whole - update
    assert wrong(update) == (count > 1)
    seen = steps_of(
        1,
        lambda rank, step: {f"m{k}": gradients[k] for k in range(count)},
        6,
        compression=name,
        rank=1,
        merging="single",
    )[0]
    assert not wrong(torch.stack([seen[5].update(f"m{k}") for k in range(count)]))


@both
@pytest.mark.parametrize("shape", [(4, 4, 3, 3), (32, 4, 3, 3), (16, 16, 3, 3), (64, 64, 3, 3), (2, 768), (5, 5)])
def test_what_is_compressed_is_smaller_for_it(name: str, shape: tuple[int, ...]) -> None:
    """By the matrix that it is. The package counts a convolution's four dimensions: ``rank * sum(shape)``."""
    rank, n, m = 4, shape[0], torch.Size(shape[1:]).numel()
    believed, true = min(rank, *shape) * sum(shape), min(rank, n, m) * (n + m)
    if len(shape) > 2:
        assert believed < n * m and believed < true  # compressed, of whatever use that is
    if shape == (4, 4, 3, 3):
        assert true > n * m

    def body(rank_: int) -> tuple[int, bool]:
        exchange, elements = opened({"a": torch.zeros(shape)}, name, rank=rank), 0
        for step in range(3):
            before = exchange.agreed.totals.elements_sent
            made(exchange, {"a": normal(step, *shape).float()})
            elements += exchange.agreed.totals.elements_sent - before if step else 0  # the first one sends both factors
        return elements, bool(exchange.agreed.current.tensors.get(("residual", "a"), torch.zeros(1)).any())

    elements, compressed = testing.run(2, body)[0]
    sent = true if name == "acpsgd" else 2 * true  # in two steps
    assert elements == (sent if true < n * m else 2 * n * m) and compressed == (true < n * m)


@both
def test_a_model_without_a_matrix_trains(name: str) -> None:
    """The package: ``IndexError``, of the first matrix."""
    with pytest.raises(IndexError):
        [p for p in [torch.zeros(3)] if p.dim() > 1][0]

    def body(rank: int) -> list[Tensor]:
        seen = steps_of_one(name, {"bias": torch.full((7,), float(rank)), "scale": torch.full((), 2.0 * rank)})
        return [seen["bias"], seen["scale"]]

    for bias, scale in testing.run(2, body):
        assert torch.equal(bias, torch.full((7,), 0.5)) and float(scale) == 1.0


def steps_of_one(name: str, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    step = made(opened({key: torch.zeros_like(tensor) for key, tensor in gradients.items()}, name), gradients)
    return {key: step.update(key) for key in gradients}


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_16_bits_are_factorised(name: str, dtype: torch.dtype) -> None:
    """Published factors are float32, whatever the gradient is."""
    gradient = normal(1, N, M).to(dtype)
    with pytest.raises(RuntimeError):
        gradient @ torch.zeros(M, RANK)
    seen = steps_of(2, lambda rank, step: {"a": gradient}, 2, compression=name)[0]
    assert seen[1].update("a").dtype == dtype and seen[1].update("a").any()


@both
def test_gradients_in_channels_last_are_factorised(name: str) -> None:
    gradient = normal(1, 16, 8, 3, 3).to(memory_format=torch.channels_last)
    with pytest.raises(RuntimeError):
        gradient.view(16, -1)
    seen = steps_of(2, lambda rank, step: {"a": gradient}, 2, compression=name)[0]
    rest = mean([accumulated(seen, 1, "a")]) - seen[1].residuals["a"]
    assert distance(matrix(seen[1].update("a")), matrix(rest)) < 1e-13


# -- how it is called -------------------------------------------------------------------------------------------------


@both
def test_some_named_parameters_are_an_error_at_once(name: str) -> None:
    """And not a ``KeyError`` in the first backward pass, as of a look into a table of names."""
    with pytest.raises(KeyError):
        {"0.weight": 1}["2.weight"]
    some = list(MODEL.named_parameters())[:2]
    with pytest.raises(ValueError, match="named_parameters"):
        agmerge.DistributedOptimizer(sgd(MODEL), some, compression=name)


@both
def test_a_closure_runs_before_its_gradients_are_combined(name: str) -> None:
    """And not after."""

    def body(rank: int, model: nn.Module, closes: bool) -> list[str]:
        optimizer, seen = wrap(model, compression=name), []
        for step in range(3):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, rank, step)
                loss.backward()
                return loss

            if closes:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            seen.append(digest(model))
        return seen

    assert agreed(on_ranks(2, MODEL, lambda r, m: body(r, m, True))) == agreed(
        on_ranks(2, MODEL, lambda r, m: body(r, m, False))
    )


def test_a_subclass_can_be_made_of_the_wrapper() -> None:
    """``super(self.__class__, self)``, as published, calls itself in one."""

    class Published:
        def __init__(self) -> None:
            super(self.__class__, self).__init__()  # noqa: UP008

    class PublishedChild(Published):
        pass

    with pytest.raises(RecursionError):
        PublishedChild()

    class Child(agmerge.DistributedOptimizer):
        pass

    def body(rank: int, model: nn.Module, kind: Callable[..., Any]) -> list[str]:
        optimizer = kind(sgd(model), model.named_parameters(), compression="acpsgd", exchange="sparse")
        return train(model, optimizer, rank, range(3))

    plain = on_ranks(2, MODEL, lambda rank, model: body(rank, model, agmerge.DistributedOptimizer))
    assert agreed(on_ranks(2, copy.deepcopy(MODEL), lambda rank, model: body(rank, model, Child))) == agreed(plain)
