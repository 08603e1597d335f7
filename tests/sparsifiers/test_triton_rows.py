# SPDX-License-Identifier: Apache-2.0
"""Rows in Triton's interpreter: what `adtopk-row` selects."""

from __future__ import annotations

import pytest
import torch
from support.triton_inputs import CPU, KINDS, assert_same, bits, vector
from torch import Tensor

import sparsifiers
from sparsifiers.gpu import RowTable, Scratch, Slots, select_rows

# Rows, columns, one row alone, padding, rows and columns longer than a program takes at once, fewer rows than a panel.
SHAPES = ((20, 64), (300, 9), (33,), (31,), (3, 1100), (5, 4, 3), (1, 7), (300, 2), (64, 64))
N = sum(torch.Size(shape).numel() for shape in SHAPES)
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # of numpy, in the interpreter


def chosen(original: Tensor, k: int, turn: int, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> tuple[Tensor, ...]:
    rows, scratch, slots = RowTable(shapes, CPU), Scratch(len(original), CPU), Slots.of(k, CPU)
    for marks in (scratch.above, scratch.ties, scratch.counts):
        marks.fill_(-1)  # of another step
    work = original.clone()
    select_rows(work, rows, k, turn, scratch, slots, commit=True)
    return slots.indices, slots.values, slots.count, work


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k, turn", [(1, 3), (150, 0), (150, 7), (1500, 1), (N, 2)])
def test_rows_are_those_of_the_sparsifier(kind: str, k: int, turn: int) -> None:
    original = vector(kind, N)
    indices, values, count, work = assert_same(lambda: chosen(original, k, turn))
    wanted = sparsifiers.get("adtopk-row").select(original, k=k, step=turn, shapes=SHAPES)
    assert int(count) == k and torch.equal(indices, wanted.indices)
    assert bits(values) == bits(original[wanted.trimmed()])
    assert bits(work.index_copy(0, wanted.trimmed(), values)) == bits(original)


@pytest.mark.parametrize("shape", [(4096,), (9, 1000), (1000, 9), (8, 8), (1, 1)])
def test_one_tensor(shape: tuple[int, ...]) -> None:
    original = vector("rounded", torch.Size(shape).numel())
    k = max(1, len(original) // 20)
    indices, *_ = assert_same(lambda: chosen(original, k, 4, (shape,)))
    wanted = sparsifiers.get("adtopk-row").select(original, k=k, step=4, shapes=(shape,))
    assert torch.equal(indices, wanted.indices)
