# SPDX-License-Identifier: Apache-2.0
"""Every sparsifier in training: nothing lost, replicas equal, density 1 is the dense exchange, and it learns."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import WIDTH, agreed, digest, mlp, on_ranks, residuals, seeded, train, trained, wrap
from torch import Tensor, nn

import sparsifiers

MODEL = seeded(mlp)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def books(compression: str, size: int, dtype: torch.dtype, steps: int) -> float:
    """The largest difference between all gradients and what was applied or kept, relative to the gradients."""
    model = copy.deepcopy(MODEL).to(dtype)

    def body(rank: int, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
        inner = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = wrap(model, inner, compression=compression, density=0.05, memory="residual")
        given = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in model.named_parameters()}
        taken = {name: torch.zeros_like(books) for name, books in given.items()}
        for step in range(steps):
            optimizer.zero_grad()
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)
            (model(x).square().mean() * (1 + step % 3)).backward()
            for name, p in model.named_parameters():
                given[name] += p.grad.double()
            optimizer.synchronize()
            for name, p in model.named_parameters():
                taken[name] += p.grad.double()
            with optimizer.skip_synchronize():
                optimizer.step()
        for name, kept in residuals(optimizer).items():
            given[name] -= kept.double()
        return given, taken, digest(taken.values())

    found = on_ranks(size, model, body)
    agreed([one[2] for one in found])
    worst = 0.0
    for name in ("0.weight", "2.weight"):  # those that are selected from
        sent = torch.stack([given[name] for given, _, _ in found]).mean(0)
        worst = max(worst, float((sent - found[0][1][name]).abs().max() / sent.abs().max()))
    return worst


@pytest.mark.parametrize("compression", sparsifiers.names())
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_what_was_sent_and_what_is_kept_are_all_gradients(compression: str, size: int) -> None:
    assert books(compression, size, torch.float32, 20) < 1e-5


@pytest.mark.parametrize("compression", sparsifiers.names())
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_what_rounds_on_the_wire_stays(compression: str, dtype: torch.dtype) -> None:
    """The sum is rounded to the gradient's dtype once a step, as a dense average is; nothing else is lost."""
    assert books(compression, 2, dtype, 10) < 10 * torch.finfo(dtype).eps


@pytest.mark.parametrize("compression", sparsifiers.names())
@pytest.mark.parametrize("size", [2, 4])
def test_density_one_is_the_dense_exchange(compression: str, size: int) -> None:
    sparse = trained(size, MODEL, 5, compression=compression, density=1.0, memory="residual")
    assert sparse == trained(size, MODEL, 5, compression="none", dense_sum="ordered")


def test_so_many_workers_that_all_their_elements_are_as_many_as_the_vector_has() -> None:
    """W * k == n, where published code takes gathered values for a dense vector."""

    def run(**options: Any) -> list[str]:
        def body(rank: int, model: nn.Module) -> list[str]:
            optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
            return train(model, optimizer, rank, range(2))

        return agreed(on_ranks(4, MODEL, body))

    assert run(compression="topk", density=0.25) != run(compression="none")
    assert books("topk", 4, torch.float32, 5) < 1e-5
