# SPDX-License-Identifier: Apache-2.0
"""Low rank: nothing is lost and replicas are equal, whatever is unused, late, frozen, tied, merged or summed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import (
    WIDTH,
    AwkwardModel,
    Parts,
    agreed,
    awkward_batch,
    awkward_groups,
    digest,
    loss_of,
    mlp,
    on_ranks,
    residuals,
    seeded,
    wrap,
)
from support.awkward_training import THAW
from support.low_rank_conservation import LOW_RANK, Books, assert_nothing_is_lost, bases, run
from torch import nn
from torch.nn import functional as F

import agmerge
import merging

MODEL, PARTS, AWKWARD = seeded(mlp), seeded(Parts), seeded(AwkwardModel, 7)
HYBRIDS: dict[str, Any] = {"hybrid": {"0.*": "topk", ".*": "acpsgd"}, "some whole": {"0.*": "none", ".*": "powersgd"}}
WAYS: dict[str, dict[str, Any]] = {
    "by layer": {"merging": "layerwise"},
    "in one": {"merging": "single"},
    "parts": {"merging": merging.Plan((3, 3), parts=(3, 2))},
    "dense buffers": {"merging": merging.Plan((3, 3), dense=(True, False)), "exchange": "auto"},
    "labelled": {"merging": merging.Plan((2, 4), labels=("ahead", "ahead"))},
    "groups": {"num_groups": 2},
    "predivided": {"gradient_predivide_factor": 2.0},
    "sums": {"op": agmerge.Sum},
    "ordered": {"dense_sum": "ordered"},
    "fp16": {"wire": "fp16"},
    "bf16": {"wire": "bf16"},
    "fp32": {"wire": "fp32"},
    "clipping memory": {"memory": "residualgtopk"},
    "dense": {"dense": [".*0.weight"]},
    "all that saves": {"dense": lambda name, parameter: False},
    "ranks": {"rank": {"0.weight": 1, ".*": 7}},
    "zeros for unused": {"unused": "zero"},
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("compression", LOW_RANK)
def test_whatever_the_options_nothing_is_lost(compression: str, way: str, size: int) -> None:
    run(size, MODEL, range(8), compression=compression, **WAYS[way])


@pytest.mark.parametrize("exchange", ["sparse", "oktopk", "masked", "auto"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_lose_nothing(name: str, exchange: str) -> None:
    if name == "some whole" and exchange in ("oktopk", "masked"):
        return  # nothing is selected, so that is refused
    run(3, MODEL, range(8), compression=HYBRIDS[name], exchange=exchange, density=0.1)


# -- who takes part ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("compression", LOW_RANK)
def test_an_awkward_model_loses_nothing(compression: str, size: int) -> None:
    """Tied, unused, rank-dependent, alternating, frozen, late; channels_last, float64; 16 bits are rounded on the way,
    so here they are float32."""
    model = seeded(lambda: AwkwardModel(torch.float32), 7)

    def loss(model: AwkwardModel, rank: int, step: int) -> torch.Tensor:
        return model.loss(awkward_batch(rank, step), rank, step)

    def thaw(model: AwkwardModel, rank: int, step: int) -> None:
        if step == THAW:
            model.unfreeze()

    def inner(model: nn.Module) -> torch.optim.SGD:
        return torch.optim.SGD(awkward_groups(model), lr=0.01, momentum=0.9)  # type: ignore[arg-type]

    small = merging.get("threshold", bytes=8192)
    run(size, model, range(2 * THAW), loss, inner, thaw, compression=compression, merging=small)


@pytest.mark.parametrize("compression", LOW_RANK)
def test_bases_and_residuals_outlive_a_freeze(compression: str) -> None:
    def body(rank: int, model: Parts) -> list[str]:
        optimizer, books, seen = wrap(model, compression=compression), Books(model), []
        for step in range(9):
            if step in (3, 6):
                model.a.requires_grad_(step == 6)
                model.a.zero_grad()
                before = {name: rows for name, rows in bases(optimizer).items() if name[1] == "a.weight"}
                assert len(before) == 1
            optimizer.zero_grad()
            model.loss(rank, step, "ab").backward()
            books.step(optimizer)
            if 3 <= step < 6:
                after = {name: rows for name, rows in bases(optimizer).items() if name[1] == "a.weight"}
                assert before.keys() == after.keys() and digest(before.values()) == digest(after.values())
            seen.append(digest([*model.parameters(), *bases(optimizer).values()]))
        return [seen, (books, residuals(optimizer))]  # type: ignore[list-item]

    found = on_ranks(2, PARTS, body)
    assert len(set(agreed([one[0] for one in found]))) == 9  # type: ignore[type-var]
    assert_nothing_is_lost([one[1] for one in found])  # type: ignore[misc]


@pytest.mark.parametrize("how", ["wrapper", "inner"])
@pytest.mark.parametrize("compression", LOW_RANK)
def test_groups_that_are_added_are_factorised_from_then_on(compression: str, how: str) -> None:
    def body(rank: int, model: Parts) -> Any:
        first = [*model.trunk.parameters(), *model.head.parameters()]
        optimizer = wrap(model, torch.optim.SGD(first, lr=0.1), compression=compression)
        books, seen = Books(model), []
        for step in range(8):
            if step == 4:
                adder = optimizer if how == "wrapper" else optimizer.optimizer
                adder.add_param_group({"params": list(model.a.parameters()), "lr": 0.05})
            optimizer.zero_grad()
            model.a.zero_grad()
            model.loss(rank, step, "a" if step >= 4 else "").backward()
            books.step(optimizer)
            seen.append(digest(model))
        assert "a.weight" in {name for _, name in bases(optimizer)}
        return seen, (books, residuals(optimizer))

    found = on_ranks(2, PARTS, body)
    assert len(set(agreed([seen for seen, _ in found]))) == 8
    assert_nothing_is_lost([kept for _, kept in found])


# -- what a step is ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", LOW_RANK)
def test_clipping_after_synchronize_moves_updates_and_nothing_that_is_kept(compression: str) -> None:
    def body(rank: int, model: nn.Module, clip: bool) -> Any:
        optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.0), compression=compression)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.synchronize()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            with optimizer.skip_synchronize():
                optimizer.step()
        kept = bases(optimizer)
        return digest(residuals(optimizer).values()), digest(kept[key] for key in sorted(kept))

    assert on_ranks(2, MODEL, lambda rank, m: body(rank, m, True)) == on_ranks(2, MODEL, lambda r, m: body(r, m, False))


# -- layers of other kinds --------------------------------------------------------------------------------------------


class Words(nn.Module):
    """An embedding with gradients of sparse layout, and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, WIDTH, sparse=True)
        self.out = nn.Linear(WIDTH, 48)


@pytest.mark.parametrize("compression", [*LOW_RANK, "hybrid"])
def test_gradients_of_sparse_layout_are_made_dense_on_request(compression: str) -> None:
    how: Any = {"words.*": "topk", ".*": "acpsgd"} if compression == "hybrid" else compression

    def loss(model: Words, rank: int, step: int) -> torch.Tensor:
        source = torch.Generator().manual_seed(10 * step + rank)
        tokens = torch.randint(0, 64, (8,), generator=source)
        return F.cross_entropy(model.out(model.words(tokens)), torch.randint(0, 48, (8,), generator=source))

    def body(rank: int, model: Words) -> str:
        optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), compression=how, sparse_as_dense=True)
        for step in range(4):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            optimizer.step()
        selected = {"words.weight"} if compression == "hybrid" else set()
        assert {name for _, name in bases(optimizer)} == {"out.weight", "words.weight"} - selected
        return digest(model)

    agreed(on_ranks(2, seeded(Words), body))
