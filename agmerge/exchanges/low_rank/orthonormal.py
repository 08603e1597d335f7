# SPDX-License-Identifier: Apache-2.0
"""Make rows orthonormal, and never divide by zero: Gram-Schmidt, which is done twice and is then exact enough.

A row that is zero, not finite, or dependent on those before it becomes a unit vector, less its projection on these
rows: the one with the smallest projection, of equals the first; so no dimension is lost. The result does not depend on
the rows' scale. Rows of float32 in CPU memory, of which all ranks must make the same, get the same bits on every
processor, with the compiled loops (kernel_orthonormal.c) and without them: sums are of double precision and made in one
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparsifiers import kernel_low_rank

CLASSES = 16  # partial sums of a dot product, as in kernel_orthonormal.c
DEPENDENT = 8  # largest remainder of a dependent row, in units of its own rounding

Doubles = NDArray[np.float64]


def orthonormalize(factors: Sequence[torch.Tensor]) -> None:
    """Make the rows of each factor, (r, length) with r <= length, orthonormal, in place."""
    if kernel_low_rank.orthonormalize(factors):
        return
    others: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    for factor in factors:
        if factor.dtype == torch.float32 and factor.device.type == "cpu":
            if not kernel_low_rank.orthonormalize([factor]):
                factor.copy_(torch.from_numpy(by_numpy(factor.numpy())))
        else:
            others.setdefault((factor.shape, factor.dtype, factor.device), []).append(factor)
    for alike in others.values():
        torch._foreach_copy_(alike, by_torch(torch.stack(alike)).unbind())


# -- numpy ------------------------------------------------------------------------------------------------------------


def by_numpy(factor: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the orthonormal rows that the compiled loops make of ``factor``, float32 (r, length), bit for bit."""
    basis = np.empty((0, factor.shape[1]))
    with np.errstate(all="ignore"):  # rows that are not finite are replaced
        for row in factor.astype(np.float64):
            before, vector = _dot(row, row), _project_out(row, basis)
            left = _dot(vector, vector)
            if not (left < np.inf and left > (DEPENDENT * np.finfo(np.float32).eps) ** 2 * before):
                covered = np.zeros_like(row)
                for other in basis:
                    covered += other * other
                vector = np.zeros_like(row)
                vector[covered.argmin()] = 1
                vector = _project_out(vector, basis)
                left = _dot(vector, vector)
            unit = (vector * (1 / np.sqrt(left))).astype(np.float32)
            basis = np.vstack([basis, unit])  # as it was rounded
    return basis.astype(np.float32)


def _project_out(vector: Doubles, basis: Doubles) -> Doubles:
    for _ in range(2):
        scales = [_dot(row, vector) for row in basis]
        for scale, row in zip(scales, basis, strict=True):
            vector = vector - scale * row
    return vector


def _dot(a: Doubles, b: Doubles) -> np.float64:
    # LANES partial sums, of which numpy adds each in order, and which are then added in halves.
    products = np.zeros(-(-len(a) // CLASSES) * CLASSES)
    np.multiply(a, b, out=products[: len(a)])
    classes = np.add.reduce(products.reshape(-1, CLASSES), axis=0) + 0.0  # a sum of -0 alone is 0
    while len(classes) > 1:
        classes = classes[: len(classes) // 2] + classes[len(classes) // 2 :]
    return np.float64(classes[0])


# -- torch ------------------------------------------------------------------------------------------------------------


def by_torch(factors: torch.Tensor) -> torch.Tensor:
    """Return orthonormal rows for each of ``factors`` (count, r, length), without waiting for their device."""
    count, r, length = factors.shape
    epsilon = torch.finfo(factors.dtype).eps
    rows = factors.to(torch.float64)
    largest = rows.abs().amax(-1, keepdim=True)  # squares of doubles over- and underflow
    rows = rows / torch.where(largest > 0, largest, torch.ones_like(largest))
    basis = torch.zeros_like(rows)
    for k in range(r):
        known = basis[:, :k]
        row = rows[:, k]
        vector = _without(row, known)
        left = vector.norm(dim=-1, keepdim=True)
        independent = (left > DEPENDENT * epsilon * row.norm(dim=-1, keepdim=True)) & (left < torch.inf)
        unit = torch.zeros_like(row).scatter_(-1, known.square().sum(1).argmin(-1, keepdim=True), 1.0)
        vector = torch.where(independent, vector, _without(unit, known))
        basis[:, k] = vector / vector.norm(dim=-1, keepdim=True)
    return basis.to(factors.dtype)


def _without(vectors: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    # vectors (count, length) less their projections on the rows known (count, k, length).
    column = vectors.unsqueeze(-1)
    for _ in range(2):
        column = column - known.transpose(1, 2) @ (known @ column)
    return column.squeeze(-1)
