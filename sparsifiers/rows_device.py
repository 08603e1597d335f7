# SPDX-License-Identifier: Apache-2.0
"""Find the largest of each row on a device, without waiting for the device.

Shapes and constants depend on k, the turn and the tensors' shapes alone and no value is read by the host, so
the calls only queue work.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsifiers.device import largest_magnitudes_on_device
from sparsifiers.magnitude import bit_view, magnitude_mask
from sparsifiers.rows import Matrix, deal, matrices


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
