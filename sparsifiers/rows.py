"""Rows of the tensors in a vector, and how k is dealt to them.

A tensor of two or more dimensions [O, I, ...] is the C-order matrix [O, I * ...], and its longer axis is the
one that is searched: its rows are that matrix's rows, or its columns if O > I * ... (ADTopk, HPDC'24, so that
the fewest rows are forced to send; of the reference, `proofs/` does this and the library does not). Any other
tensor is one row. Dealing is ours: the reference sends max(1, int(cols * density)) of every row, which exceeds
the budget wherever rows are short.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: its multiples fill a circle of length CIRCLE most evenly
CIRCLE = 1 << 64


@dataclass(frozen=True)
class Matrix:
    """Where one tensor lies in the vector and what its rows are; structured: it has two or more dimensions.

    columns: row r is column r of the C-order matrix [length, rows], instead of row r of [rows, length].
    """

    offset: int
    rows: int
    length: int
    columns: bool
    structured: bool

    @property
    def stop(self) -> int:
        """One past its last element."""
        return self.offset + self.rows * self.length

    def flat(self, positions: NDArray[np.int32]) -> NDArray[np.int32]:
        """Indices into the vector, ascending, of ascending positions r * length + place, int32[m] -> int32[m]."""
        if self.columns:
            row, place = np.divmod(positions, self.length)
            positions = np.sort(place * self.rows + row)
        return positions + self.offset


@dataclass(frozen=True)
class Share:
    """How many elements a matrix sends, and the row that is dealt the first of them."""

    matrix: Matrix
    count: int
    start: int

    def quotas(self) -> NDArray[np.int64]:
        """Elements of each row, int64[rows]: the count dealt one by one, round the rows, from `start` on."""
        each, more = divmod(self.count, self.matrix.rows)
        quotas = np.full(self.matrix.rows, each, dtype=np.int64)
        quotas[(self.start + np.arange(more)) % self.matrix.rows] += 1
        return quotas


def matrices(shapes: Sequence[Sequence[int]]) -> list[Matrix]:
    """The tensors that a vector concatenates, as matrices; empty ones are left out."""
    found, offset = [], 0
    for shape in shapes:
        size = math.prod(shape)
        if size:
            structured = len(shape) > 1
            outer = shape[0] if structured else 1
            inner = size // outer
            found.append(Matrix(offset, min(outer, inner), max(outer, inner), outer > inner > 1, structured))
        offset += size
    return found


def deal(tensors: Sequence[Matrix], k: int, turn: int) -> list[Share]:
    """What each tensor sends in one turn: k in all, its part of the vector's k rounded up or down.

    With C the offsets, n the vector's length and s = turn * n / golden ratio, modulo n, tensor t sends
    floor((k C[t+1] + s) / n) - floor((k C[t] + s) / n): the differences add up to k, and none exceeds the
    tensor's size. By the three-gap theorem an arc of length f is met in any 2 / f consecutive steps round the
    circle by the golden ratio; so a tensor whose part f of k is below one sends in any 2 / f turns.

    Its rows are dealt to like players at a table: the first element goes to the row after the one that was
    dealt the last in the turn before. Under a constant k no two rows of a tensor therefore ever differ by more
    than one in what they have sent. Everything is a pure function of the arguments, in exact integers.
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
    """The sum of (GOLDEN * i + start) // CIRCLE over i < count, in O(log count) as Euclid's algorithm."""
    total, step, circle = 0, GOLDEN, CIRCLE
    while True:
        total += count * (count - 1) // 2 * (step // circle) + count * (start // circle)
        step, start = step % circle, start % circle
        last = step * count + start
        if last < circle:
            return total
        count, start, circle, step = last // circle, last % circle, step, circle
