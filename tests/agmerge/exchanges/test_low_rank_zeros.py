# SPDX-License-Identifier: Apache-2.0
"""Rows and columns that are zero on all ranks, gradient and residual, are zero in updates of PowerSGD and ACP-SGD.

ACP-SGD's bases are of the step before: rows that a script has used then, and does not use now, would get noise, of
which Adam makes full steps.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import on_ranks, seeded, wrap
from support.low_rank_steps import NAMES, SHAPES, accumulated, drawn, made, matrix, opened, steps_of
from torch import Tensor, nn

from agmerge import testing
from agmerge.exchanges.low_rank.bases import LEFT, RIGHT, empty_lanes, empty_lanes_on_device
from agmerge.exchanges.message.format import Flag

both = pytest.mark.parametrize("name", NAMES)
MATRICES = {"tall": (96, 20), "wide": (24, 130), "conv": (16, 8, 3, 3)}


def in_turns(rank: int, step: int) -> dict[str, Tensor]:
    """Return gradients of which rows and columns take turns; some never have a value, some on one rank alone."""
    gradients = {}
    for name, shape in MATRICES.items():
        values = matrix(drawn(rank, step, torch.float32, {name: shape})[name]).float()
        values[step % 3 :: 3] = 0.0
        values[:, step % 2 :: 4] = -0.0
        values[1], values[:, 3] = 0.0, 0.0
        if rank:
            values[4] = 0.0
        gradients[name] = values.view(shape)
    return gradients


@both
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"memory": "none"},
        {"memory": "none", "merging": "single", "dense_sum": "ordered"},
        {"memory": "none", "wire": "bf16", "merging": "layerwise"},
        {},
    ],
    ids=str,
)
def test_what_is_zero_on_all_ranks_is_zero_in_the_update(name: str, size: int, options: dict[str, Any]) -> None:
    seen = steps_of(size, in_turns, 7, compression=name, rank=4, **options)
    zeros = 0
    for tensor in MATRICES:
        for step in range(7):
            there = torch.stack([matrix(accumulated(of, step, tensor)) for of in seen]).any(0)
            update = matrix(seen[0][step].update(tensor))
            assert update.any()
            assert not update[~there.any(1)].any()
            assert not update[:, ~there.any(0)].any()
            zeros += int((~there.any(1)).sum())
            assert all(torch.equal(of[step].update(tensor), seen[0][step].update(tensor)) for of in seen)
    assert zeros >= 3 * 7  # row 1 of each


def test_nothing_is_lost_of_rows_that_some_ranks_have_nothing_of() -> None:
    """A rank with empty rows commits its product later, also if another one has none, or sends zeros."""

    def gradients(rank: int, step: int) -> dict[str, Tensor]:
        if step == 2 and rank == 1:
            return drawn(rank, step, torch.float32, MATRICES)
        if step == 4 and rank == 2:
            return {name: torch.zeros(shape) for name, shape in MATRICES.items()}
        return in_turns(rank, step)

    def body(rank: int) -> list[dict[str, tuple[Tensor, Tensor, Tensor]]]:
        exchange = opened({name: torch.zeros(shape) for name, shape in MATRICES.items()}, "acpsgd", merging="single")
        found = []
        for step in range(6):
            seen = made(exchange, gradients(rank, step))
            found.append({name: (seen.gradients[name], seen.update(name), seen.residuals[name]) for name in MATRICES})
            for (kind, _), tensor in exchange.agreed.current.tensors.items():
                if kind == "residual":  # bases stay: they are not zero in rows that the next step has nothing of
                    tensor.zero_()
        return found

    ranks = testing.run(3, body, inject=testing.jitter(3))
    for step in range(6):
        for name in MATRICES:
            given, updates, left = (torch.stack(part) for part in zip(*(of[step][name] for of in ranks), strict=True))
            torch.testing.assert_close(updates[0] + left.mean(0), given.mean(0), rtol=0, atol=1e-5)
            empty = ~matrix(given.abs().sum(0)).any(1)
            assert not matrix(updates[0])[empty].any()
            assert int(empty.sum()) > 1 or step == 2


def test_messages_of_matrices_without_such_rows_have_one_round() -> None:
    """Rows that were zero from the beginning need none either."""

    def body(rank: int) -> list[list[str]]:
        exchange = opened({name: torch.zeros(shape) for name, shape in MATRICES.items()}, "acpsgd", merging="single")
        exchange.agree()
        calls = []
        for step in range(4):
            known = len(testing.calls())
            given = drawn(rank, step, torch.float32, MATRICES)
            for tensor in given.values():
                tensor[1] = 0.0
            if step == 3:
                given["tall"].zero_()
                given["tall"][0, 0] = 1.0
                exchange.agreed.current.tensors["residual", "tall"].zero_()
            made(exchange, given)
            calls.append([name for _, name, _ in testing.calls()[known:]])
        return calls

    first, *later, last = testing.run(2, body)[0]
    assert len(first) == 2  # both factors
    assert [len(step) for step in later] == [1, 1]
    assert [name.rpartition("/")[2] for name in last[1:]] == ["empty rows"]


def test_that_a_rank_has_all_rows_is_no_flag_of_the_round() -> None:
    def body(rank: int) -> int:
        exchange = opened({name: torch.zeros(shape) for name, shape in SHAPES.items()}, "acpsgd")
        for step in range(2):
            for name, tensor in drawn(rank, step, torch.float32).items():
                exchange.ready(name, tensor)
            flags = exchange.finish().flags
            exchange.commit()
        return flags

    assert testing.run(2, body) == [Flag.ACTIVE] * 2


class Words(nn.Module):
    """Language model of which each step uses other words, and nobody the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(80, 32, padding_idx=0)
        self.head = nn.Linear(32, 80)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.embedding(words).mean(1))


@both
@pytest.mark.parametrize("options", [{"memory": "none"}, {}, {"sync": "updates"}], ids=str)
def test_adam_moves_no_word_that_no_rank_has_met(name: str, options: dict[str, Any]) -> None:
    """Without a residual not even those of the step before."""

    def body(rank: int, model: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        start, absent, gradients = model.embedding.weight.detach().clone(), [], []
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        optimizer = wrap(model, inner, compression=name, exchange="sparse", rank=4, dense=[], **options)
        for step in range(6):
            words = torch.randint(0, 13, (8, 6), generator=torch.Generator().manual_seed(10 * step + rank))
            words += 1 + 13 * (step % 3)
            words[:, 4:] = 0
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(words), words[:, 0]).backward()
            optimizer.step()
            absent.append(torch.ones(80).index_fill_(0, words.flatten(), 0.0))
            gradients.append(model.embedding.weight.grad.abs().amax(1))
        return model.embedding.weight.detach() - start, torch.stack(absent), torch.stack(gradients)

    seen = on_ranks(2, seeded(Words), body)
    for moved, _, gradients in seen:
        assert moved[1:40].any()
        assert not moved[0].any()
        assert not moved[40:].any()
        if options == {"memory": "none"}:
            assert not (gradients * seen[0][1] * seen[1][1]).any()


@pytest.mark.parametrize("side", [LEFT, RIGHT])
def test_empty_rows_are_those_that_are_zero_within_the_basis(side: str) -> None:
    source = torch.Generator().manual_seed(0)
    for number in range(40):
        whole = torch.randn(23, 61, generator=source) * (torch.rand(23, 1, generator=source) > 0.4)
        whole *= torch.rand(23, 61, generator=source) > (0.9 if number % 2 else 0.1)
        if number == 0:
            whole[:, 0], whole[3, 0] = 0.0, torch.nan
        other = torch.randn(23, 61, generator=source) * (number % 3 > 0)
        length = whole.shape[0 if side == LEFT else 1]
        basis = torch.randn(3, length, generator=source) * (torch.rand(length, generator=source) > 0.2)
        for terms in ((whole,), (whole - other, other), (-0.0 * whole.nan_to_num(), whole)):
            total = sum(terms[1:], terms[0])
            zero = ~((total if side == LEFT else total.t()) != 0).any(1)
            expected, found = basis.any(0) & zero, empty_lanes(side, basis, *terms)
            assert (found is None) == (not expected.any())
            assert found is None or torch.equal(found, expected)
            others = torch.randn(2, length, generator=source)
            on_device = empty_lanes_on_device([side, side], [basis, others], [total, total])
            assert torch.equal(on_device, torch.cat([expected, zero]))
