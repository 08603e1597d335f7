# SPDX-License-Identifier: Apache-2.0
"""Low rank as an option, by itself and beside a sparsifier: who compresses which tensor, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import agreed, digest, mlp, on_ranks, residuals, seeded, train, wrap
from support.low_rank_steps import (
    MATRICES,
    NAMES,
    SHAPES,
    Step,
    accumulated,
    distance,
    drawn,
    made,
    mean,
    opened,
    steps_of,
)
from torch import Tensor, nn

import agmerge
import sparsifiers
from agmerge import testing

both = pytest.mark.parametrize("name", NAMES)
MODEL = seeded(mlp)  # 0.weight (48, 32), 2.weight (32, 48), 4.weight (10, 32), and biases
DENSITY = 0.05


def hybrid(name: str) -> dict[str, str]:
    return {"wide|square": "topk", "conv": "none", ".*": name}


# -- both tensor classes ----------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("merging", ["layerwise", "single"])
def test_a_hybrid_loses_nothing_in_either_class(name: str, size: int, merging: str) -> None:
    seen = steps_of(size, drawn, 6, compression=hybrid(name), density=DENSITY, rank=2, merging=merging)
    for step in range(6):
        for tensor in SHAPES:
            before = mean([accumulated(of_rank, step, tensor) for of_rank in seen])
            after = mean([of_rank[step].residuals.get(tensor, torch.zeros_like(before)) for of_rank in seen])
            assert distance(seen[0][step].update(tensor) + after, before) < 1e-13, (step, tensor)
        assert len({digest(of_rank[step].updates.values()) for of_rank in seen}) == 1


@both
def test_each_tensor_is_compressed_as_its_pattern_says(name: str) -> None:
    seen = steps_of(1, drawn, 3, compression=hybrid(name), density=DENSITY, rank=2, merging="layerwise")[0]
    for one in seen:
        assert set(one.bases) == {"tall"}
        assert torch.equal(one.update("conv"), one.gradients["conv"])  # whole
        assert torch.equal(one.update("bias"), one.gradients["bias"])  # no matrix
        for tensor in ("wide", "square"):
            assert one.update(tensor).count_nonzero() == sparsifiers.budget(DENSITY, one.update(tensor).numel())
        assert torch.linalg.matrix_rank(one.update("tall")) == 2


@both
def test_a_rank_that_skips_a_tensor_of_either_class_loses_nothing(name: str) -> None:
    def body(rank: int) -> list[Step]:
        tensors = {tensor: torch.zeros(shape) for tensor, shape in SHAPES.items()}
        exchange = opened(tensors, hybrid(name), density=DENSITY, rank=2)
        seen = []
        for step in range(5):
            given: dict[str, Tensor | None] = dict(drawn(rank, step, torch.float32))
            given["tall" if step % 2 else "wide"] = None if rank == step % 3 else given["tall" if step % 2 else "wide"]
            seen.append(made(exchange, given))
        return seen

    seen = testing.run(3, body)
    for tensor in ("tall", "wide"):
        updates = sum(one.update(tensor).double() for one in seen[0])
        rest = mean([of_rank[-1].residuals[tensor] for of_rank in seen])
        zero = torch.zeros(SHAPES[tensor])
        given = sum(mean([of_rank[step].gradients.get(tensor, zero) for of_rank in seen]) for step in range(5))
        assert distance(updates + rest, given) < 1e-6


# -- ranks by pattern -------------------------------------------------------------------------------------------------


@both
def test_ranks_by_pattern_are_those_of_the_factors(name: str) -> None:
    seen = steps_of(2, drawn, 3, compression=name, rank={"tall": 1, "wide|conv": 3})[0]
    for one in seen:
        assert {tensor: len(basis) for tensor, (_, basis) in one.bases.items()} == {
            "tall": 1, "wide": 3, "conv": 3, "square": 4,
        }  # fmt: skip
        for tensor in MATRICES:
            update = one.update(tensor).reshape(SHAPES[tensor][0], -1)
            assert torch.linalg.matrix_rank(update) == len(one.bases[tensor][1])


@both
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rank": {"0.wieght": 2}}, r"rank: the pattern '0.wieght' matches no parameter.* 0.weight, 0.bias"),
        ({"rank": {"0.weight": 2, "weight": 3}}, "rank: the pattern 'weight' matches no parameter"),
        ({"rank": 0}, "rank=0: expected a whole number > 0"),
        ({"rank": "4"}, "rank='4': expected a whole number > 0"),
        ({"rank": {}}, "rank={}: expected a number, or at least one pattern"),
        ({"density": {".*": 0.1}}, "density=.* sends factors, and selects nothing"),
        ({"density": "importance"}, "density=.* sends factors, and selects nothing"),
        ({"warmup": 100}, "warmup=100 has no effect"),
        ({"sparsify": "ahead"}, "sparsify='ahead' has no effect .* sends factors.* Remove sparsify="),
        ({"exchange": "oktopk"}, "exchange='oktopk' has no effect .* how ranks combine"),
        ({"exchange": "masked"}, "exchange='masked' has no effect"),
        ({"exchange": "two-level"}, "exchange='two-level' .* Pass exchange='sparse' or 'auto'"),
        (
            {"wire": "int8"},
            "wire='int8' is not supported with low-rank factors.* Choose from: 'auto', 'fp32', 'fp16', 'bf16'",
        ),
        ({"memory": "dgc"}, "memory='dgc' applies momentum to the values that a sparsifier selects"),
        ({"dense": ["nothing"]}, "dense: the pattern 'nothing' matches no parameter"),
    ],
    ids=str,
)
def test_what_has_no_meaning_is_refused_with_what_to_do(name: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        wrap(MODEL, compression=name, **options)


@pytest.mark.parametrize(
    ("compression", "options", "text"),
    [
        ({"0.weight": "topk", "nothing": "powersgd"}, {}, "compression: the pattern 'nothing' matches no parameter"),
        ({"0.*": "topk", ".*": "randomk"}, {}, "of the same kind, sparse. Use at most one of each kind"),
        ({"0.*": "powersgd", ".*": "acpsgd"}, {}, "of the same kind, low-rank. Use at most one of each kind"),
        ({".*": "none"}, {}, "compression by pattern: expected at least one"),
        ({}, {}, "compression={}: expected a compressor.s name, or at least one pattern"),
        ({"(": "topk", ".*": "powersgd"}, {}, "compression by pattern"),
        ({"0.*": "topk", ".*": "powersdg"}, {}, "did you mean 'powersgd'"),
        ("topk", {"rank": {".*": 4}}, "rank=.* sends no factors"),
        (sparsifiers.PowerSGD(2), {"rank": 3}, "Pass the rank to one of them"),
        ({"0.*": "topk", ".*": "powersgd"}, {"memory": "dgc"}, "memory='dgc' applies momentum"),
    ],
    ids=str,
)
def test_so_is_a_hybrid_that_cannot_be(compression: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        wrap(MODEL, compression=compression, **options)


@pytest.mark.parametrize("compression", ["topk", "none", "bf16"])
def test_a_rank_is_refused_with_what_has_no_factors_and_waits_where_the_compressor_is_swapped(compression: str) -> None:
    def body(who: int, model: nn.Module) -> None:
        with pytest.raises(ValueError, match="rank=8"):
            wrap(model, compression=compression, rank=8)
        optimizer = wrap(model, compression="powersgd", rank=8)
        train(model, optimizer, who, range(2))
        optimizer.set_compressor(compression)
        train(model, optimizer, who, range(2, 4))
        optimizer.set_compressor("powersgd")
        train(model, optimizer, who, range(4, 6))
        assert optimizer._reducer.exchange.agreed.config.compression.compressor.rank == 8

    on_ranks(2, MODEL, body)


def test_ranks_that_are_told_other_ranks_do_not_begin() -> None:
    def body(rank: int) -> None:
        opened({"a": torch.zeros(40, 30)}, "powersgd", rank=2 + rank)

    errors = testing.run(2, body, return_errors=True)
    assert all(isinstance(error, agmerge.RankMismatchError) for error in errors)
    assert "rank" in agreed([str(error) for error in errors])


@both
def test_small_tensors_and_what_dense_names_go_whole(name: str) -> None:
    def body(who: int, model: nn.Module, **options: Any) -> set[str]:
        optimizer = wrap(model, compression=name, **options)
        train(model, optimizer, who, range(2))
        return {key for key, tensor in residuals(optimizer).items() if tensor.any()}

    assert agreed(on_ranks(2, MODEL, body)) == {"0.weight", "2.weight"}
    assert agreed(on_ranks(2, MODEL, lambda rank, model: body(rank, model, dense=[]))) == {
        "0.weight",
        "2.weight",
        "4.weight",
    }
    assert agreed(on_ranks(2, MODEL, lambda rank, model: body(rank, model, dense=["0.*"], rank=1))) == {
        "2.weight",
        "4.weight",
    }
