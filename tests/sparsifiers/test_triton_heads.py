# SPDX-License-Identifier: Apache-2.0
"""Heads of all ranks' messages, merged by a kernel in Triton's interpreter as by torch's operations."""

from __future__ import annotations

import functools
import operator

import pytest
import torch
from support.triton_inputs import assert_same
from torch import Tensor

from sparsifiers import gpu

FREE, USED = 2, 6  # numbers of words: one that ranks have of their own, and the first of those at the end


@pytest.mark.parametrize("words", [8, 41])
@pytest.mark.parametrize("ranks, own", [(1, 0), (3, 1), (8, 7)])
@pytest.mark.parametrize("strange", [(), (0,), (0, 2)])
@pytest.mark.parametrize("key", [5, -(1 << 62) - 7])
def test_words_are_merged_and_strangers_are_found(
    words: int, ranks: int, own: int, strange: tuple[int, ...], key: int
) -> None:
    strange = tuple(rank for rank in strange if rank < ranks and rank != own)

    def call() -> tuple[Tensor, ...]:
        rows = torch.arange(words, dtype=torch.int32).repeat(ranks, 1)
        rows[:, FREE] += 1 << torch.arange(ranks, dtype=torch.int32)
        rows[:, USED:] = torch.randint(1 << 31, (ranks, words - USED), generator=torch.Generator().manual_seed(words))
        for rank in strange:
            rows[rank, USED - 1] ^= 8
        figures = torch.full((ranks, 6), 3, dtype=torch.int64)[:, 1:5]
        figures[:, 2:3].view(torch.float64)[:] = torch.arange(ranks, dtype=torch.float64).unsqueeze(1) + 0.25
        head, said = torch.zeros(words + 1, dtype=torch.int32), torch.full((5,), 9, dtype=torch.int64)
        gpu.merge_heads(rows, figures, own, key, (head[:-1], said[:-1]), free=FREE, used=USED)
        return head, said

    head, said = assert_same(call)
    squares = ranks * (ranks - 1) / 2 + 0.25 * ranks
    assert said.tolist()[:2] == [max(strange, default=-1) + 1, key] and said.tolist()[3:] == [0, 9]
    assert said[2:3].view(torch.float64).item() == squares
    assert head[FREE] == functools.reduce(operator.or_, [FREE + (1 << rank) for rank in range(ranks)])
    assert head[-1] == 0
