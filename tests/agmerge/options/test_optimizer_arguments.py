# SPDX-License-Identifier: Apache-2.0
"""What the arguments that are accepted do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import agreed, digest, loss_of, mlp, on_ranks, residuals, seeded, sgd, train, wrap
from torch import Tensor, nn

import agmerge
import merging
import sparsifiers
from sparsifiers import Kind

MODEL = seeded(mlp)
WEIGHTS = ["0.weight", "2.weight"]  # those of 1024 elements or more


def trained(size: int, lr: float = 0.1, **options: Any) -> list[str]:
    """The digests of five steps with ``options``."""

    def body(rank: int, model: nn.Module) -> list[str]:
        return train(model, wrap(model, sgd(model, lr=lr), **options), rank, range(5))

    return agreed(on_ranks(size, MODEL, body))


@pytest.mark.parametrize("compression", ["none", "topk", "bf16"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_sum_is_the_average_times_the_number_of_ranks(size: int, compression: str) -> None:
    """W is a power of two, so dividing the learning rate by it gives the same bits."""
    average = trained(size, compression=compression)
    assert trained(size, lr=0.1 / size, compression=compression, op=agmerge.Sum) == average
    assert len(set(average)) == 5


@pytest.mark.parametrize("factor", [2.0, 4.0, 0.5])
@pytest.mark.parametrize("compression", ["none", "topk", "bf16"])
@pytest.mark.parametrize("size", [1, 3])
def test_predividing_by_a_power_of_two_changes_no_bit(size: int, compression: str, factor: float) -> None:
    plain = trained(size, compression=compression)
    assert trained(size, compression=compression, gradient_predivide_factor=factor) == plain


@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
def test_predividing_by_three_loses_nothing(compression: str) -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model, compression=compression, gradient_predivide_factor=3.0)
        loss_of(model, rank, 0).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.synchronize()
        updates = {name: p.grad.clone() for name, p in model.named_parameters()}
        with optimizer.skip_synchronize():
            optimizer.step()
        kept = residuals(optimizer)
        for name, gradient in gradients.items():
            torch.testing.assert_close(updates[name] + kept.get(name, 0), gradient, rtol=1e-6, atol=1e-9)

    on_ranks(1, MODEL, body)


def test_predividing_keeps_a_sum_in_range() -> None:
    """Float16 gradients whose sum overflows and whose mean does not."""
    model = seeded(lambda: nn.Linear(32, 32, bias=False)).half()

    def body(rank: int, model: nn.Module, factor: float) -> Tensor:
        optimizer = wrap(model, compression="none", gradient_predivide_factor=factor)
        model.weight.grad = torch.full_like(model.weight, 30000.0)
        optimizer.synchronize()
        return model.weight.grad

    assert all(torch.isinf(found).all() for found in on_ranks(4, model, lambda r, m: body(r, m, 1.0)))
    for found in on_ranks(4, model, lambda r, m: body(r, m, 4.0)):
        assert torch.equal(found, torch.full_like(found, 30000.0))


@pytest.mark.parametrize(
    ("dense", "sparse"),
    [
        (None, WEIGHTS),
        ([], [name for name, _ in MODEL.named_parameters()]),
        ([r"\d\.bias", r"2\.weight"], ["0.weight", "4.weight"]),
        (lambda name, parameter: parameter.shape[0] != 48, ["0.bias", "0.weight"]),
        ([".*"], []),
    ],
    ids=["default", "none", "patterns", "callable", "all"],
)
def test_the_dense_rule_says_what_is_sent_whole(dense: Any, sparse: list[str]) -> None:
    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer = wrap(model, dense=dense)
        train(model, optimizer, rank, range(2))
        return sorted(
            member.name for member in optimizer._reducer.exchange.agreed.members() if member.kind is Kind.SPARSE
        )

    assert agreed(on_ranks(2, MODEL, body)) == sorted(sparse)


def test_a_pattern_that_is_only_part_of_a_name_matches_nothing_and_is_refused() -> None:
    def body(rank: int, model: nn.Module) -> None:
        with pytest.raises(ValueError, match="the pattern .weight. matches no parameter.* 0.weight, 0.bias"):
            wrap(model, dense=[r".*\.bias", "weight"])

    on_ranks(2, MODEL, body)


def test_without_memory_what_is_not_sent_is_dropped() -> None:
    def body(rank: int, model: nn.Module) -> dict[str, Tensor]:
        optimizer = wrap(model, memory="none", merging="layerwise")
        train(model, optimizer, rank, range(3))
        assert residuals(optimizer) == {}
        optimizer.zero_grad()
        loss_of(model, rank, 3).backward()
        mine = {name: dict(model.named_parameters())[name].grad.clone() for name in WEIGHTS}
        optimizer.step()
        return {name: mine[name].abs().flatten().topk(16).values.amin() for name in WEIGHTS} | {
            f"update {name}": dict(model.named_parameters())[name].grad for name in WEIGHTS
        }

    for found in on_ranks(1, MODEL, body):
        for name in WEIGHTS:  # 1 % of 1536: exactly the sixteen largest of this gradient alone
            update = found[f"update {name}"]
            assert update.count_nonzero() == 16
            assert update[update != 0].abs().min() == found[name]


EQUIVALENT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"compression": "adtopk", "density": 0.01, "merging": "threshold", "exchange": "sparse"}),
    ({"density": 0.05}, {"compression": sparsifiers.get("adtopk", density=0.05)}),
    ({"memory": "residual"}, {"memory": sparsifiers.memory("residual")}),
    ({"compression": "fp16"}, {"compression": agmerge.Compression.fp16}),
    ({"compression": "bf16"}, {"compression": agmerge.Compression.bf16}),
    ({"compression": "none"}, {"compression": agmerge.Compression.none, "memory": "none"}),
    ({"merging": "single"}, {"merging": merging.get("single")}),
    ({"merging": "layerwise"}, {"merging": merging.Plan((1,) * 6)}),
]


@pytest.mark.parametrize(("one", "other"), EQUIVALENT, ids=[str(n) for n in range(len(EQUIVALENT))])
def test_two_ways_to_say_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert trained(2, **one) == trained(2, **other)


def test_every_argument_that_should_changes_the_run() -> None:
    options: list[dict[str, Any]] = [
        {},
        {"density": 0.05},
        {"compression": "none"},
        {"compression": "bf16"},
        {"compression": "fp16"},
        {"memory": "none"},
        {"merging": "layerwise"},
        {"dense": [r".*bias"]},
        {"op": agmerge.Sum},
    ]
    runs = [tuple(trained(2, **one)) for one in options]
    assert len(set(runs)) == len(runs)


def test_nobody_waits_for_an_optimizer_of_one_rank() -> None:
    def body(rank: int, model: nn.Module) -> str:
        train(model, wrap(model, timeout=5.0), rank, range(2))
        return digest(model)

    assert on_ranks(1, MODEL, body) != [digest(MODEL)]


def test_a_dense_rule_is_asked_once_an_agreement() -> None:
    """Else one that changes its mind in between would give ranks other messages than they agreed on."""

    def body(rank: int, model: nn.Module) -> list[int]:
        asked: list[str] = []

        def rule(name: str, parameter: torch.Tensor) -> bool:
            asked.append(name)
            return False

        optimizer = wrap(model, dense=rule)
        counts = [len(asked)]
        for step in range(3):
            train(model, optimizer, rank, range(step, step + 1))
            counts.append(len(asked))
        return counts

    tensors = len(list(MODEL.parameters()))
    first, *rest = agreed(on_ranks(2, MODEL, body))
    assert rest[0] - first == tensors  # the agreement of the first step
    assert rest[1] == rest[0] == rest[2]
