# SPDX-License-Identifier: Apache-2.0
"""``torch.optim.SparseAdam`` with ``nn.Embedding(sparse=True)``: indices and values of all ranks are gathered."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import agreed, digest, on_ranks, seeded
from torch import Tensor, nn

import agmerge

WORDS = 40


class Bag(nn.Module):
    """An embedding with sparse gradients below a layer with dense ones."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8, sparse=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x).mean(dim=1))


def words_of(rank: int, step: int) -> Tensor:
    """Words that differ by rank and come twice; of rank 1 none in step 2."""
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, WORDS, (4, 5), generator=source)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    if rank == 1 and step == 2:
        return model.head(torch.ones(1, 8)).square().sum()  # the embedding is not used
    return model(words_of(rank, step)).square().sum()


def pair(model: Bag) -> list[torch.optim.Optimizer]:
    return [torch.optim.SparseAdam([model.words.weight], lr=0.1), torch.optim.SGD(model.head.parameters(), lr=0.1)]


def reference(size: int, steps: int, factor: float) -> Bag:
    """What one process makes of the averages (or sums) of all ranks' gradients."""
    model = copy.deepcopy(MODEL)
    optimizers = pair(model)
    for step in range(steps):
        model.zero_grad()
        (sum(loss_of(model, rank, step) for rank in range(size)) * factor).backward()
        for optimizer in optimizers:
            optimizer.step()
    return model


MODEL = seeded(Bag)


@pytest.mark.parametrize("op", [agmerge.Average, agmerge.Sum])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_it_trains_as_in_one_process(size: int, op: Any) -> None:
    def body(rank: int, model: Bag) -> tuple[str, Bag]:
        optimizer = agmerge.DistributedOptimizer(pair(model), model.named_parameters(), compression="none", op=op)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        return digest(model), model

    results = on_ranks(size, MODEL, body)
    agreed([found for found, _ in results])
    expected = reference(size, 5, 1 / size if op is agmerge.Average else 1.0)
    for own, other in zip(results[0][1].parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own, other)


def test_sparse_adam_by_itself_and_synchronize() -> None:
    """The published one: a model of embeddings alone."""

    def body(rank: int, model: Bag) -> str:
        inner = torch.optim.SparseAdam([model.words.weight], lr=0.1)
        optimizer = agmerge.DistributedOptimizer(inner, [("words.weight", model.words.weight)])
        for step in range(4):
            optimizer.zero_grad()
            model.words(words_of(rank, step)).square().sum().backward()
            if step == 2:
                optimizer.synchronize()
                assert model.words.weight.grad.layout == torch.sparse_coo
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        return digest(model)

    assert agreed(on_ranks(2, MODEL, body)) != digest(MODEL)


def test_a_rank_that_has_joined_takes_part_without_words() -> None:
    def body(rank: int, model: Bag) -> str:
        optimizer = agmerge.DistributedOptimizer(pair(model), model.named_parameters(), compression="none")
        for step in range(2 + 2 * rank):
            optimizer.zero_grad()
            loss_of(model, 0, step).backward()
            optimizer.step()
        optimizer.join()
        return digest(model)

    agreed(on_ranks(2, MODEL, body))


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_what_is_not_finite_is_the_same_on_all_ranks(nonfinite: str) -> None:
    def body(rank: int, model: Bag) -> str:
        optimizer = agmerge.DistributedOptimizer(
            pair(model), model.named_parameters(), compression="none", nonfinite=nonfinite
        )
        optimizer.zero_grad()
        model.words(words_of(rank, 0)).mul(torch.inf if rank == 1 else 1.0).sum().backward()
        if nonfinite == "raise":
            with pytest.raises(agmerge.NonFiniteError, match="infinite or NaN: rank 1: 'words.weight'"):
                optimizer.step()
        else:
            optimizer.step()
        assert digest(model) == digest(MODEL)
        optimizer.zero_grad()
        loss_of(model, rank, 1).backward()
        optimizer.step()
        return digest(model)

    assert agreed(on_ranks(2, MODEL, body)) != digest(MODEL)


def test_what_means_nothing_is_refused() -> None:
    def body(rank: int, model: Bag) -> None:
        inner = torch.optim.SparseAdam([model.words.weight], lr=0.1)
        with pytest.raises(ValueError, match="sparse_as_dense=True is not supported with"):
            agmerge.DistributedOptimizer(inner, sparse_as_dense=True)
        with pytest.raises(ValueError, match="is not supported with SparseAdam, whose"):
            agmerge.DistributedOptimizer(inner, model=model.words, merging="dear")

    on_ranks(2, MODEL, body)


def test_a_dense_gradient_is_an_error_that_says_what_to_do() -> None:
    def body(rank: int, model: Bag) -> None:
        optimizer = agmerge.DistributedOptimizer(pair(model), model.named_parameters(), compression="none")
        model(words_of(rank, 0)).sum().backward()
        model.words.weight.grad = torch.zeros_like(model.words.weight)
        with pytest.raises(ValueError, match=r"'words\.weight' has a gradient of layout torch\.strided.*Adam"):
            optimizer.step()

    on_ranks(1, MODEL, body)
