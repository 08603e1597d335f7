# SPDX-License-Identifier: Apache-2.0
"""Search for the largest of each row of the tensors in a vector, on a device and in CPU memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsifiers import native
from sparsifiers.largest import (
    BLOCK,
    bit_view,
    largest,
    largest_magnitudes,
    largest_magnitudes_on_device,
    magnitude_mask,
)
from sparsifiers.rows import Matrix, deal, matrices, table, top

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
# vector of its own. Columns of a C-order matrix are copied in strips at least a cache line wide. Tables that `native`
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
    if native.reads(table):
        positions = rows_top_compiled(table, mask, quotas, matrix.columns)
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


# Tables by compiled loops.

ROOM = 1 << 17  # slots of scratch that `rows_top_compiled` may take at any size
PANEL = 64  # columns that are searched together at least: four cache lines of each row


def rows_top_compiled(
    table: NDArray[np.int32], mask: int, quotas: NDArray[np.int64], transposed: bool = False
) -> NDArray[np.int32] | None:
    """Return the indices in the flattened table of the quotas[r] largest keys `table & mask` of each row r, ascending.

    table: int32 [rows, length] that `native.reads` allows; if transposed [length, rows], of which column r is row r.
    quotas: int64[rows], each in [0, length]; ValueError for others.

    int32[quotas.sum()]; of equal keys in a row the first are taken. None for so few rows that one is better searched
    as a vector, and where columns have too many candidates, because the largest of most of them stand close
    together.
    """
    length, rows = table.shape if transposed else table.shape[::-1]
    quotas = np.ascontiguousarray(quotas, dtype=np.int64)
    if quotas.shape != (rows,) or (rows and not 0 <= quotas.min() <= quotas.max() <= length):
        raise ValueError(f"quotas of shape {quotas.shape} must be {rows} counts in [0, {length}]")
    room = max(ROOM, table.size // 4)
    if transposed:
        return _columns_top(table, mask, quotas, room)
    if 3 * length > room:
        return None
    indices = np.empty(int(quotas.sum()), dtype=np.int32)
    if len(indices):
        scratch = np.empty(3 * length, dtype=np.int32)
        given = native.address(quotas), native.address(scratch), native.address(indices)
        native.ROWS(native.address(table), rows, length, mask, *given)
    return indices


def _columns_top(table: NDArray[np.int32], mask: int, quotas: NDArray[np.int64], room: int) -> NDArray[np.int32] | None:
    # All columns together where there is room, otherwise in panels, with a sort of the results.
    length, columns = table.shape
    total, most = int(quotas.sum()), int(quotas.max(initial=0))
    indices = np.empty(total, dtype=np.int32)
    if total == 0:
        return indices
    needed = native.COLUMNS_SCRATCH.run((length, columns, columns, total, most))
    panels = min(-(-needed // room), -(-columns // PANEL))
    width = -(-columns // panels // 16) * 16 if panels > 1 else columns
    held = 0
    for first in range(0, columns, width):
        part = quotas[first : first + width]
        count = int(part.sum())
        if count:
            slots = native.COLUMNS_SCRATCH.run((length, len(part), columns, count, most))
            scratch = np.empty(slots, dtype=np.int32)
            status = native.COLUMNS(
                native.address(table) + 4 * first, length, len(part), columns, mask, native.address(part), count, most,
                native.address(scratch), native.address(indices) + 4 * held,
            )  # fmt: skip
            if status:
                return None
            indices[held : held + count] += first
            held += count
    if panels > 1:
        indices.sort()
    return indices
