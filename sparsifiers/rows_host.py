# SPDX-License-Identifier: Apache-2.0
"""Largest of each row: the rows of tensors, k dealt to them, and the search on a device and in CPU memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsifiers import kernel
from sparsifiers.device import largest_magnitudes_on_device
from sparsifiers.exact_topk import BLOCK, bit_view, largest, largest_magnitudes, magnitude_mask

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


# On a device, without waiting for it. Shapes and constants depend on k, the turn and the tensors' shapes alone and no
# value is read by the host, so the calls only queue work.


def largest_in_rows_on_device(vector: Tensor, k: int, turn: int, shapes: Sequence[Sequence[int]]) -> Tensor:
    """Return the indices of `largest_in_rows`, of floats [n] on any device: int32[k], ascending."""
    keys = bit_view(vector) & magnitude_mask(vector.dtype)
    taken = torch.zeros_like(keys, dtype=torch.bool)
    for share in deal(matrices(shapes), k, turn):
        if share.count:
            rows = share.matrix.rows
            each, more = divmod(share.count, rows)
            quotas = (torch.arange(rows, device=keys.device) - share.start) % rows < more
            table(taken, share.matrix)[:] = top(table(keys, share.matrix), quotas + each, each + (more > 0))
    return places(taken, k)


def maxima_and_largest_on_device(vector: Tensor, k: int, step: int, forced: Sequence[Matrix]) -> Tensor:
    """Return the indices of `maxima_and_largest`, of floats [n] on any device: int32[k], ascending."""
    keys = bit_view(vector) & magnitude_mask(vector.dtype)
    maxima = torch.cat([_maxima(keys, matrix) for matrix in forced])
    rows = len(maxima)
    if k <= rows:
        turned = (torch.arange(k, device=keys.device) + step * k) % rows
        return maxima[turned].sort().values.to(torch.int32)
    best = largest_magnitudes_on_device(vector, k).long()
    forced_flags = torch.zeros_like(keys, dtype=torch.bool).index_fill_(0, maxima, True)
    others = keys[best].masked_fill(forced_flags[best], -1)
    left = torch.full_like(best[:1], k - rows)
    filled = best[places(top(others[None], left, k - rows)[0], k - rows)]
    return torch.cat([maxima, filled]).sort().values.to(torch.int32)


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


def places(taken: Tensor, count: int) -> Tensor:
    """Return where the true elements of bool[n], `count` of them, stand: int32[count], ascending."""
    ranks = torch.arange(1, count + 1, dtype=torch.int32, device=taken.device)
    return torch.searchsorted(taken.cumsum(0, dtype=torch.int32), ranks, out_int32=True)


def _maxima(keys: Tensor, matrix: Matrix) -> Tensor:
    """Return the index in the vector of the largest of each row of one matrix, int64[rows]; of equals the first."""
    row = torch.arange(matrix.rows, device=keys.device)
    place = table(keys, matrix).argmax(1)  # the first of equals
    return matrix.offset + (place * matrix.rows + row if matrix.columns else row * matrix.length + place)


# In CPU memory, with scratch for a few rows.
#
# Keys of as many rows as fit the cache are copied and searched together; a row that does not fit is searched as a
# vector of its own. Columns of a C-order matrix are copied in strips at least a cache line wide. Tables that `kernel`
# can read, and has room for, are searched by compiled loops, with the same result.

LINE = 16  # fp32 elements of a cache line
STRIP = 64  # columns copied together where a column is long: fewer visits to every memory page
PART = 12  # of so many columns one is copied at a time: scratch is some 2.5 times the copy
PATCH = 512  # elements of a column copied at a time: the lines of a patch stay in the cache
Keys = NDArray[np.signedinteger[Any]]


def largest_in_rows(bits: Keys, mask: int, k: int, turn: int, shapes: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """Return the largest of each row, as many as `deal` gives it: indices int32[k], ascending; of equals the lowest.

    bits: signed integers [n] of any stride, not changed; mask: see `magnitude_mask`; turn: of `deal`; shapes: of the
    tensors that the vector concatenates, n >= 1 elements in all.
    """
    indices = np.empty(k, dtype=np.int32)
    held = 0
    for share in deal(matrices(shapes), k, turn):
        if share.count:
            indices[held : held + share.count] = largest_of(bits, mask, share.matrix, share.quotas())
            held += share.count
    return indices


def largest_of(bits: Keys, mask: int, matrix: Matrix, quotas: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return the indices in the vector `bits` of the quotas[r] largest of each row r of one matrix, ascending."""
    shape = (matrix.length, matrix.rows) if matrix.columns else (matrix.rows, matrix.length)
    table = bits[matrix.offset : matrix.stop].reshape(shape)
    if kernel.reads(table):
        positions = kernel.rows_top(table, mask, quotas, matrix.columns)
        if positions is not None:
            return positions + matrix.offset
    return matrix.flat(rows_top(table.T if matrix.columns else table, mask, quotas))


def maxima_and_largest(bits: Keys, mask: int, k: int, step: int, forced: Sequence[Matrix]) -> NDArray[np.int32]:
    """Return the largest of each row of `forced`, and the largest others up to k in all: indices int32[k], ascending.

    bits: signed integers [n], n >= 1, of any stride, not changed; mask: see `magnitude_mask`; forced: the matrices
    of which all rows must send. Of R > k rows only those with (r - step * k) % R < k do. Of equal keys the lowest index
    is taken.
    """
    rows = sum(matrix.rows for matrix in forced)
    wanted = np.ones(rows, dtype=np.int64)
    if k < rows:
        wanted[(step * k + np.arange(k, rows)) % rows] = 0
    parts: list[NDArray[np.int32]] = [np.empty(0, dtype=np.int32)]
    first = 0
    for matrix in forced:
        parts.append(largest_of(bits, mask, matrix, wanted[first : first + matrix.rows]))
        first += matrix.rows
    maxima = np.concatenate(parts)
    if k <= rows:
        return maxima
    # The k - rows largest of the others are among the k largest of all: at most `rows` others precede them.
    best = largest_magnitudes(bits, mask, k)
    places = np.searchsorted(best, maxima)
    places[places == k] = 0
    others = np.delete(best, places[best[places] == maxima])
    return np.sort(np.concatenate([maxima, others[largest(bits[others] & mask, k - rows)]]))


def rows_top(table: Keys, mask: int, quotas: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return the positions r * length + place of the quotas[r] largest keys `table & mask` of each row r, ascending.

    table: signed integers [rows, length] of any strides, not changed; quotas: int64[rows], each in [0, length].
    int32[quotas.sum()]; of equal keys in a row the first are taken.
    """
    rows, length = table.shape
    positions = np.empty(int(quotas.sum()), dtype=np.int32)
    height = max(1, BLOCK // length)
    if table.strides[0] < table.strides[1] and height < LINE:  # neighbours lie in the same cache lines
        height = max(height, min(STRIP, rows // PART))
    held = 0
    for first in range(0, rows, height):
        wanted = quotas[first : first + height]
        served = np.flatnonzero(wanted)
        if not len(served):
            continue
        strip = table[first : first + height]
        if len(served) < len(strip):
            strip, wanted = strip[served], wanted[served]
        if len(strip) == 1 and length > BLOCK:
            places = largest_magnitudes(strip[0], mask, int(wanted[0])).astype(np.int64)
        else:
            places = _top(_keys(strip, mask), wanted)
        end = held + len(places)
        row, place = np.divmod(places, length)
        positions[held:end] = (served[row] + first) * length + place
        held = end
    return positions


def _keys(strip: Keys, mask: int) -> Keys:
    """Return `strip & mask` in C order, for any strides of the strip."""
    keys = np.empty(strip.shape, dtype=strip.dtype)
    width = PATCH if strip.strides[0] < strip.strides[1] else strip.shape[1]
    for start in range(0, strip.shape[1], width):
        patch = np.s_[:, start : start + width]
        np.bitwise_and(strip[patch], mask, out=keys[patch])
    return keys


def _top(keys: Keys, wanted: NDArray[np.int64]) -> NDArray[np.intp]:
    """Return positions of the wanted[r] >= 1 largest of each row r of C-order keys, ascending; of equals the first."""
    rows, length = keys.shape
    if wanted.max() == 1:
        first: NDArray[np.intp] = keys.argmax(axis=1)
        return first + np.arange(0, keys.size, length)
    ranks = length - wanted
    smallest = np.partition(keys, np.unique(ranks), axis=1)[np.arange(rows), ranks][:, None]
    taken = keys >= smallest
    places = np.flatnonzero(taken)
    if len(places) == wanted.sum():
        return places
    for row in np.flatnonzero(taken.sum(axis=1) > wanted):
        equal = np.flatnonzero(keys[row] == smallest[row])
        surplus = np.count_nonzero(taken[row]) - wanted[row]
        taken[row, equal[len(equal) - surplus :]] = False
    return np.flatnonzero(taken)
