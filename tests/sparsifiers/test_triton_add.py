# SPDX-License-Identifier: Apache-2.0
"""K4 in Triton's interpreter: the sum in rank order, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.triton_inputs import assert_same, bits, for_interpreter, vector
from torch import Tensor

from sparsifiers.gpu import add_ranks
from sparsifiers.gpu.kernels import combining

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # of numpy, in the interpreter


def messages(n: int, counts: list[int], capacity: int, kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Indices, values and counts as they lie in received messages: one row a rank, with other bytes between them."""
    rng = np.random.default_rng(n)
    indices = torch.full((len(counts), capacity + 5), 1 << 30, dtype=torch.int32)
    values = torch.full((len(counts), capacity + 3), float("nan")).to(dtype)
    heads = torch.full((len(counts), 3), -7, dtype=torch.int32)
    for rank, count in enumerate(counts):
        indices[rank, :count] = torch.from_numpy(np.sort(rng.permutation(n)[:count]).astype(np.int32))
        values[rank, :count] = (
            for_interpreter(vector(kind, count, rank), dtype).to(dtype) if count else values[rank, :0]
        )
        heads[rank, 1] = count
    return indices[:, :capacity], values[:, :capacity], heads[:, 1]


@pytest.mark.parametrize("kind", ["normal", "cauchy", "specials", "zeros", "subnormal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_sum_of_ranks(kind: str, dtype: torch.dtype) -> None:
    n, capacity = 10_001, 900
    received = messages(n, [900, 0, 1, 450, 899], capacity, kind, dtype)

    def call() -> tuple[Tensor, ...]:
        update = torch.full((n + 2,), 5.0)
        add_ranks(update[1:-1], *received, 1 / 3)
        return (update,)

    (update,) = assert_same(call)
    assert update[0] == 5.0 and update[-1] == 5.0
    total = torch.zeros(n)
    for index, value, count in zip(*received, strict=True):
        total.index_add_(0, index[:count], value[:count].float().mul_(1 / 3))
    assert bits(update[1:-1]) == bits(total)


@pytest.mark.parametrize("n, counts", [(1, [1]), (1, [0, 1, 1]), (4096, [4096] * 3), (5000, [0, 0]), (8191, [1] * 64)])
def test_few_and_all(n: int, counts: list[int]) -> None:
    received = messages(n, counts, max(*counts, 1), "normal", torch.float32)

    def call() -> tuple[Tensor, ...]:
        update = torch.full((n,), 5.0)
        add_ranks(update, *received, 0.25)
        return (update,)

    assert_same(call)


def test_large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combining, "ENOUGH", 1)
    test_the_sum_of_ranks("normal", torch.float32)


def test_indices_of_a_damaged_message_write_nowhere_else() -> None:
    """The host finds the damage later: until then nothing else may have changed."""
    n, rng = 9000, np.random.default_rng(0)
    store = torch.full((n + 2000,), 5.0)
    wild = torch.from_numpy(rng.integers(-(1 << 31), 1 << 31, (3, 500))).int()
    indices = wild.clone()
    indices[:2] = torch.arange(500) * 18
    indices[:2, 3::7] = wild[:2, 3::7]  # in stretches that bisection takes for those of a tile
    indices[1, 5::7] = n + 3
    counts = torch.tensor([500, 1 << 30, -4], dtype=torch.int32)
    combining.launch_add(store[1000 : 1000 + n], indices, torch.ones(3, 500), counts, 1.0)
    assert (store[:1000] == 5.0).all() and (store[1000 + n :] == 5.0).all()
