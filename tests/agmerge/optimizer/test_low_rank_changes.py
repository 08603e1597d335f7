# SPDX-License-Identifier: Apache-2.0
"""Low rank that comes, changes and goes: compressors that follow each other lose nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import agreed, digest, loss_of, mlp, on_ranks, residuals, seeded, sgd, train, wrap
from support.low_rank_conservation import (
    LOW_RANK,
    ROUNDED,
    Books,
    assert_bases_are_orthonormal,
    assert_nothing_is_lost,
    bases,
)
from torch import nn

import agmerge
import merging
import sparsifiers

MODEL = seeded(mlp)
HYBRID = {"0.*": "topk", ".*": "acpsgd"}
CHAINS: list[list[Any]] = [
    ["topk", "powersgd", "acpsgd", "none", "topk"],
    ["powersgd", "acpsgd", "powersgd", "topk", "acpsgd"],
    ["adtopk", HYBRID, "powersgd", {"0.*": "powersgd", ".*": "topk"}],
    ["none", "powersgd", "bf16", "acpsgd"],
]


@pytest.mark.parametrize("switch", ["between steps", "and load"])
@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_compressors_that_follow_each_other_lose_nothing(chain: list[Any], switch: str) -> None:
    """Seven steps each: an odd number, so that one that alternates is left in either phase."""

    def body(rank: int, model: nn.Module) -> Any:
        optimizer, books, seen = wrap(model, compression=chain[0]), Books(model), []
        for number, name in enumerate(chain):
            if number and switch == "between steps":
                optimizer.set_compressor(name)
            elif number:
                state = optimizer.state_dict()
                optimizer.close()
                optimizer = wrap(model, compression=name)
                if name in ("none", "bf16"):
                    optimizer.set_compressor(name)
                optimizer.load_state_dict(state)
            for step in range(7):
                optimizer.zero_grad()
                loss_of(model, rank, 10 * number + step).backward()
                books.step(optimizer)
                if name == "none":
                    assert not any(kept.any() for kept in residuals(optimizer).values())
            kept = bases(optimizer)
            assert_bases_are_orthonormal(kept)
            seen.append((digest(model), digest(kept[key] for key in sorted(kept))))
        return seen, (books, residuals(optimizer))

    if switch == "and load" and "none" in chain:
        return  # one that drops nothing has no place for residuals, and says so
    found = on_ranks(2, MODEL, body)
    agreed([seen for seen, _ in found])
    assert_nothing_is_lost([kept for _, kept in found], rounded=2e-3 if "bf16" in chain else ROUNDED)


@pytest.mark.parametrize("compression", LOW_RANK)
def test_a_rank_that_is_not_given_is_the_one_in_use(compression: str) -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model, compression=compression, rank=2)

        def rows() -> set[int]:
            optimizer.zero_grad()
            loss_of(model, rank, 0).backward()
            optimizer.step()
            return {len(basis) for basis in bases(optimizer).values()}

        assert rows() == {2}
        optimizer.set_compressor("topk", density=0.1)
        optimizer.set_compressor(compression)
        assert rows() == {2}
        optimizer.set_compressor(compression, rank=3)
        assert rows() == {3}
        optimizer.set_compressor(compression, seed=5)
        assert rows() == {3}
        optimizer.set_compressor(sparsifiers.low_rank(compression, 5))
        assert rows() == {5}
        optimizer.set_compressor(compression)
        assert rows() == {5}
        optimizer.set_compressor(compression, rank={"0.weight": 1, ".*": 6})
        assert rows() == {1, 6}
        optimizer.set_compressor(compression, seed=6, rank={"0.weight": 2, ".*": 6})
        assert rows() == {2, 6}
        for given, words in (
            ({"compression": sparsifiers.low_rank(compression, 5), "rank": 2}, "disagree"),
            ({"compression": compression, "rank": 0}, "a whole number > 0"),
            ({"compression": "topk", "rank": {".*": 2}}, "sends no factors"),
            ({"compression": compression, "warmup": 3}, "selects nothing"),
            ({"compression": compression, "memory": "dgc"}, "applies momentum to the values that a"),
        ):
            with pytest.raises(ValueError, match=words):
                optimizer.set_compressor(**given)
        assert rows() == {2, 6}

    on_ranks(1, MODEL, body)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"rank": 3}, r"rank: 4 on rank 0; 3 on rank 1"),
        ({"compression": "acpsgd"}, r"compression: powersgd on rank 0; acpsgd on rank 1"),
        ({"compression": sparsifiers.low_rank("powersgd", seed=1)}, r"options: .*seed=0.* on rank 0; .*seed=1"),
        ({"compression": {"0.*": "none", ".*": "powersgd"}}, r"compression: powersgd on rank 0; by-name on rank 1"),
    ],
    ids=str,
)
def test_ranks_that_differ_are_told(odd: dict[str, Any], words: str) -> None:
    def body(rank: int, model: nn.Module) -> tuple[str, str]:
        with pytest.raises(agmerge.RankMismatchError, match=words) as first:
            wrap(model, **{"compression": "powersgd", **(odd if rank else {})})
        optimizer = wrap(model, compression="topk")
        train(model, optimizer, rank, range(2))
        with pytest.raises(agmerge.RankMismatchError) as then:
            optimizer.set_compressor(**{"compression": "powersgd", **(odd if rank else {})})
        train(model, optimizer, rank, range(2, 4))
        return str(first.value), str(then.value), digest(model)  # type: ignore[return-value]

    agreed(on_ranks(2, MODEL, body))


def spoil_bases(optimizer: Any) -> None:
    for kept in optimizer._reducer.exchange.agreed.buffers.flat.bases._kept.values():
        kept.rows[0].mul_(0.5)


def test_a_replica_whose_bases_differ_is_found() -> None:
    """With ACP-SGD, where an update is the product of a rank's own basis and the sum of factors."""

    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model, compression="acpsgd", check_every=1)
        train(model, optimizer, rank, range(2))
        if rank == 1:
            spoil_bases(optimizer)
        with pytest.raises(agmerge.DivergenceError, match="weight.*on rank 1"):
            train(model, optimizer, rank, range(2, 5))

    on_ranks(2, MODEL, body)


IN_USE: list[dict[str, Any]] = [
    {"density": "importance"},
    {"density": {".*": 0.1}},
    {"warmup": 5},
    {"sparsify": "ahead"},
    {"exchange": "oktopk"},
    {"exchange": "masked"},
    {"exchange": "auto", "merging": "agmerge"},
    {"merging": merging.Plan((3, 3), labels=("ahead", "ahead"))},
    {"merging": merging.Plan((3, 3), parts=(2, 2))},
    {"backward_passes_per_step": 2},
]


@pytest.mark.parametrize("compression", ["powersgd", HYBRID], ids=str)
@pytest.mark.parametrize("options", IN_USE, ids=str)
def test_what_is_about_a_selection_waits_until_there_is_one_again(options: dict[str, Any], compression: Any) -> None:
    def body(rank: int, model: nn.Module) -> Any:
        optimizer = wrap(model, sgd(model, lr=0.05), **{"compression": "topk", "density": 0.1, **options})
        books, seen = Books(model), []
        for number, name in enumerate(("topk", compression, "topk")):
            if number:
                optimizer.set_compressor(name)
            for step in range(6):
                optimizer.zero_grad()
                for one in range(options.get("backward_passes_per_step", 1)):
                    loss_of(model, rank, 100 * number + 10 * one + step).backward()
                books.step(optimizer)
                seen.append(digest(model))
        return seen, (books, residuals(optimizer))

    found = on_ranks(2, MODEL, body)
    agreed([seen for seen, _ in found])
    assert_nothing_is_lost([kept for _, kept in found])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"exchange": "two-level"}, "'two-level'.*a shard of each matrix"),
        ({"dense": "partial"}, "dense='partial'.*factors are sent"),
        ({"wire": "int8"}, "wire='int8'.*low-rank factors"),
    ],
    ids=str,
)
def test_what_is_in_use_may_leave_no_room_for_factors(options: dict[str, Any], words: str) -> None:
    """Then all goes on as it was."""

    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer = wrap(model, compression="topk", **options)
        seen = train(model, optimizer, rank, range(2))
        with pytest.raises(ValueError, match=words):
            optimizer.set_compressor("acpsgd")
        return [*seen, *train(model, optimizer, rank, range(2, 4))]

    assert len(set(agreed(on_ranks(2, MODEL, body)))) == 4


def test_dear_has_no_room_for_factors() -> None:
    def body(rank: int, model: nn.Module) -> None:
        options: dict[str, Any] = {"compression": "none", "merging": "dear", "model": model}
        optimizer = agmerge.DistributedOptimizer(sgd(model), model.named_parameters(), **options)
        train(model, optimizer, rank, range(2))
        with pytest.raises(ValueError, match="merging='dear'.*sends low-rank factors"):
            optimizer.set_compressor("powersgd")
        train(model, optimizer, rank, range(2, 4))
        optimizer.flush()

    on_ranks(2, MODEL, body)


@pytest.mark.parametrize("compression", ["powersgd", "acpsgd", HYBRID], ids=str)
def test_bases_follow_a_model_that_is_recast(compression: Any) -> None:
    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer, seen = wrap(model, sgd(model, lr=0.05), compression=compression, check_every=1), []
        for step in range(9):
            if step in (3, 6):
                model.to(torch.float64 if step == 3 else torch.bfloat16)
            seen += train(model, optimizer, rank, range(step, step + 1))
            kept = bases(optimizer)
            assert {rows.dtype for rows in kept.values()} == {torch.float64 if 3 <= step < 6 else torch.float32}
            assert_bases_are_orthonormal(kept)
        return seen

    assert len(set(agreed(on_ranks(2, MODEL, body)))) == 9
