# SPDX-License-Identifier: Apache-2.0
"""Rows of the tensors in a vector, k dealt to them, and the largest of each row in torch's operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Rows of the tensors in a vector, and k dealt to them.
#
# A tensor of two or more dimensions [O, I, ...] is the C-order matrix [O, I * ...], and its longer axis is the one that
# is searched: its rows are that matrix's rows, or its columns if O > I * ... (ADTopk, HPDC'24, so that the fewest rows
# are forced to send; of the reference, `proofs/` does this and the library does not). Any other tensor is one row.
# Dealing is ours: the reference sends max(1, int(cols * density)) of every row, which exceeds the budget wherever rows
# are short.

GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: its multiples fill a circle of length CIRCLE most evenly
CIRCLE = 1 << 64


@dataclass(frozen=True)
class Matrix:
    """Place of one tensor in the vector, and its rows."""

    offset: int  # of its first element in the vector
    rows: int  # how many it has
    length: int  # elements of a row
    columns: bool  # row r is column r of the C-order matrix [length, rows], instead of row r of [rows, length]
    structured: bool  # it has two or more dimensions; any other tensor is one row

    @property
    def stop(self) -> int:
        """Return the place in the vector one past its last element."""
        return self.offset + self.rows * self.length

    def flat(self, positions: NDArray[np.int32]) -> NDArray[np.int32]:
        """Turn ascending positions r * length + place, int32[m], into indices of the vector, int32[m], ascending."""
        if self.columns:
            row, place = np.divmod(positions, self.length)
            positions = np.sort(place * self.rows + row)
        return positions + self.offset


@dataclass(frozen=True)
class Share:
    """Number of elements that a matrix sends in one turn, and the row that is dealt the first of them."""

    matrix: Matrix
    count: int  # elements in all
    start: int  # the row that is dealt the first

    def quotas(self) -> NDArray[np.int64]:
        """Return the elements of each row, int64[rows]: the count dealt one by one, round the rows, from `start` on."""
        each, more = divmod(self.count, self.matrix.rows)
        quotas = np.full(self.matrix.rows, each, dtype=np.int64)
        quotas[(self.start + np.arange(more)) % self.matrix.rows] += 1
        return quotas


def matrices(shapes: Sequence[Sequence[int]]) -> list[Matrix]:
    """Return the tensors that a vector concatenates, as matrices in order; empty ones are left out."""
    tensors, offset = [], 0
    for shape in shapes:
        size = math.prod(shape)
        if size:
            structured = len(shape) > 1
            outer = shape[0] if structured else 1
            inner = size // outer
            tensors.append(Matrix(offset, min(outer, inner), max(outer, inner), outer > inner > 1, structured))
        offset += size
    return tensors


def deal(tensors: Sequence[Matrix], k: int, turn: int) -> list[Share]:
    """Deal k elements to the tensors for one turn: to each its share of k, rounded up or down.

    tensors: those of a vector, in order, at least one; k >= 1; turn: counts the calls. All of it is a pure function of
    the arguments, in exact integers.

    With C the offsets, n the vector's length and s = turn * n / golden ratio, modulo n, tensor t sends
    floor((k C[t+1] + s) / n) - floor((k C[t] + s) / n): the differences add up to k, and none exceeds the
    tensor's size. By the three-gap theorem an arc of length f is met in any 2 / f consecutive steps round the
    circle by the golden ratio; so a tensor with a share f of k below one sends in any 2 / f turns.

    Its rows are dealt to like players at a table: the first element goes to the row after the one that was
    dealt the last in the turn before. Under a constant k no two rows of a tensor therefore ever differ by more
    than one in what they have sent.
    """
    n = tensors[-1].stop
    phase = turn * GOLDEN % CIRCLE
    shares = []
    for tensor in tensors:
        low, high = (k * end * CIRCLE // n for end in (tensor.offset, tensor.stop))
        count = (high + phase) // CIRCLE - (low + phase) // CIRCLE
        start = 0
        if count % tensor.rows:  # otherwise all rows are dealt the same
            start = (sum_of_floors(turn, high) - sum_of_floors(turn, low)) % tensor.rows
        shares.append(Share(tensor, count, start))
    return shares


def sum_of_floors(count: int, start: int) -> int:
    """Return the sum of (GOLDEN * i + start) // CIRCLE over i < count, in O(log count) as Euclid's algorithm."""
    total, step, circle = 0, GOLDEN, CIRCLE
    while True:
        total += count * (count - 1) // 2 * (step // circle) + count * (start // circle)
        step, start = step % circle, start % circle
        last = step * count + start
        if last < circle:
            return total
        count, start, circle, step = last // circle, last % circle, step, circle


# In torch's operations.


def table(values: Tensor, matrix: Matrix) -> Tensor:
    """View one matrix's slice of a contiguous vector [n] as [rows, length]."""
    flat = values[matrix.offset : matrix.stop]
    return flat.view(matrix.length, matrix.rows).t() if matrix.columns else flat.view(matrix.rows, matrix.length)


def top(keys: Tensor, quotas: Tensor, most: int) -> Tensor:
    """Return which elements are among the quotas[r] largest of their row r, bool[rows, length]; of equals the first.

    keys: integers [rows, length]; quotas: int64[rows], each in [0, most]; 1 <= most <= length.
    """
    best = keys.topk(most, dim=1).values
    # A row without a quota gets its largest as the bound: nothing is above that, and no equals are wanted.
    smallest = best.gather(1, (quotas - 1).clamp_(min=0)[:, None])
    above, equal = keys > smallest, keys == smallest
    vacant = quotas - above.sum(1)
    return above | (equal & (equal.cumsum(1, dtype=torch.int32) <= vacant[:, None]))
