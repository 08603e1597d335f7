# SPDX-License-Identifier: Apache-2.0
"""Whole rows of all ranks, added by the kernel in Triton's interpreter: the bits of sums in the order of ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.triton_inputs import assert_same, for_interpreter, vector

from sparsifiers.gpu import add_whole


@pytest.mark.parametrize("factor", [1.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "kind, n, ranks", [("normal", 2500, 3), ("cauchy", 1, 8), ("specials", 1024, 2), ("normal", 77, 1)]
)
def test_sums_are_in_the_order_of_ranks(kind: str, n: int, ranks: int, dtype: torch.dtype, factor: float) -> None:
    rows = torch.stack([for_interpreter(vector(kind, n, seed), dtype) for seed in range(ranks)]).to(dtype)
    apart = torch.zeros(ranks, n + 5, dtype=dtype)
    apart[:, :n] = rows

    def call() -> tuple[torch.Tensor, ...]:
        update = torch.full((n,), 7.0)
        add_whole(update, apart[:, :n], 1 / 3, factor=factor)
        return (update,)

    (update,) = assert_same(call)
    scale, total = np.float32(1 / 3), np.zeros(n, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for i, row in enumerate(rows.float().numpy()):
            total = row * scale if i == 0 else total + row * scale
        total *= np.float32(factor)
    assert np.array_equal(update.numpy(), total, equal_nan=True)
