# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of low rank: to the bit in either phase, to other numbers of ranks, without bases, of another rank."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import (
    agreed,
    digest,
    loss_of,
    mlp,
    on_ranks,
    residuals,
    seeded,
    sgd,
    strict_warnings,
    through_a_file,
    train,
    wrap,
)
from support.low_rank_conservation import LOW_RANK, Books, assert_bases_are_orthonormal, assert_nothing_is_lost, bases
from torch import nn

import agmerge
from agmerge.ops import Average, Sum

MODEL = seeded(mlp)
COMPRESSORS: dict[str, Any] = {**{name: name for name in LOW_RANK}, "hybrid": {"0.*": "topk", ".*": "acpsgd"}}


def everything(model: nn.Module, optimizer: Any) -> str:
    kept, left = bases(optimizer), residuals(optimizer)
    return digest([*model.parameters(), *(kept[key] for key in sorted(kept)), *(left[name] for name in sorted(left))])


def plain(model: nn.Module) -> torch.optim.SGD:
    return sgd(model, lr=0.05, momentum=0.0)


# -- as many ranks ----------------------------------------------------------------------------------------------------


def save(by: str, optimizer: Any) -> Any:
    """What a rank gives to be saved."""
    if by == "gather_state":
        return agmerge.gather_state(optimizer)
    if by == "dcp":
        return agmerge.ResidualState(optimizer).state_dict()
    return optimizer.state_dict()


def load(by: str, saved: list[Any], rank: int, optimizer: Any, path: Path) -> None:
    """Load what ranks have given."""
    if by == "dcp":
        held = agmerge.ResidualState(optimizer, path)
        state = {"residuals": held.state_dict()}
        dcp.load(state, checkpoint_id=path, no_dist=True)
        held.load_state_dict(state["residuals"])
    else:
        optimizer.load_state_dict(saved[0 if by == "gather_state" else rank])


@pytest.mark.parametrize("by", ["state_dict", "gather_state", "dcp"])
@pytest.mark.parametrize("at", [1, 4, 5])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_restart_changes_no_bit(name: str, at: int, by: str, tmp_path: Path) -> None:
    """After the cold start, and in either phase."""
    options = {"compression": COMPRESSORS[name], "rank": 3}

    def body(rank: int, model: nn.Module, steps: range, saved: list[Any] | None = None) -> Any:
        optimizer = wrap(model, plain(model), **options)
        if saved is not None:
            model.load_state_dict(saved[0][rank])
            load(by, saved[1], rank, optimizer, tmp_path)
        train(model, optimizer, rank, steps)
        return everything(model, optimizer), copy.deepcopy(model.state_dict()), save(by, optimizer)

    _, models, states = zip(*on_ranks(2, MODEL, lambda rank, model: body(rank, model, range(at))), strict=True)
    if by == "dcp":
        dcp.save({"residuals": {**states[0], **states[1]}}, checkpoint_id=tmp_path, no_dist=True)
    saved = [list(models), through_a_file(list(states))]
    after = [seen for seen, *_ in on_ranks(2, MODEL, lambda rank, model: body(rank, model, range(at, 9), saved))]
    assert after == [seen for seen, *_ in on_ranks(2, MODEL, lambda rank, model: body(rank, model, range(9)))]


# -- others -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [Average, Sum])
@pytest.mark.parametrize("sizes", [(3, 2), (2, 3), (1, 2), (3, 1)])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_another_number_of_ranks_loses_nothing_of_what_was_not_sent(name: str, sizes: tuple[int, int], op: Any) -> None:
    """What goes in before and comes out after: gradients of all are, at the end, in updates and residuals."""
    options = {"compression": COMPRESSORS[name], "op": op}

    def first(rank: int, model: nn.Module) -> Any:
        optimizer, books = wrap(model, plain(model), **options), Books(model)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            books.step(optimizer)
        return agmerge.gather_state(optimizer), books, bases(optimizer), copy.deepcopy(model.state_dict())

    def second(rank: int, model: nn.Module) -> Any:
        optimizer, books = wrap(model, plain(model), **options), Books(model)
        model.load_state_dict(before[0][3])
        optimizer.load_state_dict(whole)
        kept = bases(optimizer)
        assert kept.keys() == before[0][2].keys() and all(torch.equal(kept[key], before[0][2][key]) for key in kept)
        for step in range(4, 9):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            books.step(optimizer)
        assert_bases_are_orthonormal(bases(optimizer))
        return digest(model), books, residuals(optimizer)

    before = on_ranks(sizes[0], MODEL, first)
    whole = through_a_file(before[0][0])
    with strict_warnings():
        after = on_ranks(sizes[1], MODEL, second)
    agreed([bits for bits, *_ in after])
    weights = [1.0 if op is Sum else 1.0 / size for size in sizes]
    for key, taken in after[0][1].taken.items():
        given = sum(books.given[key] for _, books, *_ in before) * weights[0]
        given = given + sum(books.given[key] for _, books, _ in after) * weights[1]
        left = sum(kept.get(key, torch.zeros(())).double() for *_, kept in after) * weights[1]
        size = sum(books.magnitude[key] for _, books, *_ in before).norm()
        assert (taken + before[0][1].taken[key] + left - given).norm() <= 4e-5 * size, key


@pytest.mark.parametrize("compression", LOW_RANK)
def test_a_checkpoint_that_rank_0_alone_has_gives_its_bases_to_all(compression: str) -> None:
    """Its residuals are its own, and the others' begin at zero; bases must be equal, so that all take rank 0's."""

    def first(rank: int, model: nn.Module) -> Any:
        optimizer = wrap(model, plain(model), compression=compression)
        train(model, optimizer, rank, range(4))
        return optimizer.state_dict()

    def second(rank: int, model: nn.Module) -> Any:
        optimizer = wrap(model, plain(model), compression=compression, check_every=1)
        if rank == 0:
            optimizer.load_state_dict(state)
        agmerge.broadcast_parameters(model.state_dict(), root_rank=0)
        agmerge.broadcast_optimizer_state(optimizer, root_rank=0)
        seen = train(model, optimizer, rank, range(4, 7))
        kept = bases(optimizer)
        return seen, digest(kept[key] for key in sorted(kept))

    def fresh(rank: int, model: nn.Module) -> Any:
        return train(model, wrap(model, plain(model), compression=compression), rank, range(4, 7))

    state = on_ranks(2, MODEL, first)[0]
    seen, _ = agreed(on_ranks(2, MODEL, second))
    assert seen != agreed(on_ranks(2, MODEL, fresh))


@pytest.mark.parametrize("saved", ["without bases", "by top-k", "of another rank", "of a plain optimizer"])
@pytest.mark.parametrize("compression", LOW_RANK)
def test_checkpoints_without_bases_that_fit_load(compression: str, saved: str) -> None:
    """Bases are drawn anew, as at the start; residuals stay what they were."""
    other = {"of another rank": {"compression": compression, "rank": 6}, "by top-k": {"compression": "topk"}}

    def first(rank: int, model: nn.Module) -> Any:
        optimizer, books = wrap(model, plain(model), **other.get(saved, {"compression": compression})), Books(model)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            books.step(optimizer)
        state = optimizer.state_dict()
        if saved == "without bases":
            state["agmerge"].update(left_bases={}, right_bases={})
        if saved == "of a plain optimizer":
            del state["agmerge"]
        return through_a_file(state), books

    def second(rank: int, model: nn.Module) -> Any:
        optimizer, (state, books) = wrap(model, plain(model), compression=compression, rank=2), before[rank]
        books.model = model
        optimizer.load_state_dict(state)
        for step in range(4, 8):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            books.step(optimizer)
        assert {len(rows) for rows in bases(optimizer).values()} == {2}
        return digest(model), (books, residuals(optimizer))

    before = on_ranks(2, MODEL, first)
    with nullcontext() if saved == "of a plain optimizer" else strict_warnings():
        after = on_ranks(2, MODEL, second)
    agreed([bits for bits, _ in after])
    if saved != "of a plain optimizer":
        assert_nothing_is_lost([kept for _, kept in after])


def test_bases_that_are_not_finite_are_refused() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model, compression="acpsgd")
        train(model, optimizer, rank, range(2))
        state = optimizer.state_dict()
        state["agmerge"]["left_bases"]["0.weight"][0, 0] = torch.nan
        with pytest.raises(ValueError, match=r"basis.*0\.weight"):
            optimizer.load_state_dict(state)

    on_ranks(1, MODEL, body)
