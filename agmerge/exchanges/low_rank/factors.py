# SPDX-License-Identifier: Apache-2.0
"""Factorise matrices: the mathematics of PowerSGD (Vogels et al., 2019) and ACP-SGD (Zhang et al., 2023) on a page.

A tensor of two or more dimensions is a matrix D, (n, m): its first dimension by all others. It is sent as two factors,
left (r, n) and right (r, m), which stand for left^T right. A factor lies in memory row by row, each row a vector as
long as a column, or a row, of the matrix. One of them is a basis, with orthonormal rows, that all ranks have in common;
the other one is the projection of a rank's own matrix on it. All ranks compute :func:`product` and
:func:`orthonormalize` of the same factors; the results have the same bits on every processor.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from agmerge.exchanges.low_rank.orthonormal import orthonormalize
from sparsifiers import kernel_low_rank

__all__ = [
    "LEFT",
    "RIGHT",
    "Product",
    "add_and_project",
    "empty_lanes",
    "empty_lanes_on_device",
    "initial_basis",
    "matrix_shape",
    "orthonormalize",
    "product",
    "project",
    "rank_of",
    "take_off",
]

LEFT, RIGHT = "left", "right"
CACHED = 1 << 17  # elements that torch goes over again and again while they are in the caches


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return (n, m) of a tensor of two or more dimensions: its first one, and the product of the others."""
    return shape[0], math.prod(shape[1:])


def rank_of(shape: Sequence[int], rank: int) -> int:
    """Return the rank of a tensor's factors: ``rank``, but no more than its matrix has rows or columns."""
    return min(rank, *matrix_shape(shape))


def initial_basis(seed: int, name: str, length: int, rank: int) -> torch.Tensor:
    """Return orthonormal rows, float32 (rank, length), that depend on ``seed``, ``name`` and these sizes alone."""
    generator = np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))
    basis = torch.from_numpy(generator.random((rank, length)).astype(np.float32)).mul_(2).sub_(1)
    orthonormalize([basis])
    return basis


def project(matrix: torch.Tensor, side: str, basis: torch.Tensor, out: torch.Tensor) -> None:
    """Write the factor of ``matrix``, (n, m), for a basis of one side; it is of the other side.

    With a ``basis`` of the RIGHT, (r, m), it is ``basis matrix^T``, (r, n); with one of the LEFT ``basis matrix``.
    """
    if side == RIGHT and not kernel_low_rank.project_on_right(matrix, basis, out):
        torch.mm(basis, matrix.t(), out=out)
    if side == LEFT and not kernel_low_rank.project_on_left(matrix, basis, out):
        torch.mm(basis, matrix, out=out)


def add_and_project(
    matrix: torch.Tensor,
    residual: torch.Tensor,
    gradient: torch.Tensor,
    side: str,
    basis: torch.Tensor,
    out: torch.Tensor,
    *,
    off: bool = False,
    copy: torch.Tensor | None = None,
) -> bool | None:
    """Write ``matrix = residual + gradient`` and its factor, as :func:`project` does, in one pass over memory.

    Returns whether all of the sum is finite; None, with nothing done, where that takes two passes. ``off``: subtract
    the product of basis and factor in the same pass; with a basis of the RIGHT. ``copy``: a tensor of as many elements,
    to which the gradient is copied in that pass.
    """
    if side == LEFT:
        return kernel_low_rank.add_and_project_on_left(matrix, residual, gradient, basis, out, copy)
    if off:
        return kernel_low_rank.add_project_on_right_and_take_off(matrix, residual, gradient, basis, out, copy)
    return kernel_low_rank.add_and_project_on_right(matrix, residual, gradient, basis, out, copy)


def empty_lanes(side: str, basis: torch.Tensor, *terms: torch.Tensor) -> torch.Tensor | None:
    """Return which rows of a matrix, the sum of ``terms``, (n, m), are zero although its ``basis`` is not zero there.

    The product of the basis and any factor has noise in them. On the host: of most rows one element is read. Returns
    bool[n]; None if there are none. With a basis of the RIGHT these are columns: bool[m].
    """
    lanes = [term if side == LEFT else term.t() for term in terms]
    length, across = lanes[0].shape
    first = _added([lane[:, 0] for lane in lanes])
    if int(first.count_nonzero()) == length:
        return None
    left = ((first == 0) & basis.any(0)).nonzero().view(-1)  # rows of which nothing was read but zeros
    start, width = 1, 8
    while left.numel() and start < across:
        part = _added([lane[left, start : start + width] for lane in lanes])
        left = left[part.abs().amax(1) == 0]
        start, width = start + width, 2 * width
    if not left.numel():
        return None
    return torch.zeros(length, dtype=torch.bool).index_fill_(0, left, True)


def empty_lanes_on_device(
    sides: Sequence[str], bases: Sequence[torch.Tensor], matrices: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return :func:`empty_lanes` of several matrices, one behind the other, without waiting for their device."""
    pairs = zip(sides, matrices, strict=True)
    in_use = _joined([(matrix if side == LEFT else matrix.t()).any(1) for side, matrix in pairs])
    alike = len({len(basis) for basis in bases}) == 1
    covered = _joined(bases, 1).any(0) if alike else _joined([basis.any(0) for basis in bases])
    return covered > in_use


def _joined(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)


def _added(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    return terms[0] if len(terms) == 1 else terms[0] + terms[1]


def take_off(matrix: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Subtract the product of two factors: ``matrix -= left^T right``, in place."""
    if not kernel_low_rank.take_off(matrix, left, right):
        matrix.addmm_(left.t(), right, alpha=-1)


def product(left: torch.Tensor, right: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """Write ``out = scale * left^T right``, (n, m), on the host added up in one order, each product rounded by itself.

    Where a library chooses the order, as in a product of matrices, ranks on unlike processors drift apart. Devices do
    that: ranks have the same ones.
    """
    if out.device.type != "cpu":
        torch.mm(left.t(), right, out=out).mul_(scale)
    elif not kernel_low_rank.product(left, right, scale, out):
        height = max(1, CACHED // right.shape[1])
        for columns, rows in zip(torch.split(left, height, dim=1), torch.split(out, height), strict=True):
            torch.mul(columns[0].unsqueeze(1), right[0], out=rows)
            for column, row in zip(columns[1:], right[1:], strict=True):
                rows += column.unsqueeze(1) * row
            rows *= scale


class Product(NamedTuple):
    """Product of two factors, left^T right, (n, m), which is not written out."""

    left: torch.Tensor  # (r, n)
    right: torch.Tensor  # (r, m)

    def take_off(self, work: torch.Tensor) -> None:
        """Subtract it from ``work``, 1-D in C order, in place; what lies behind it, padding, stays as it is."""
        n, m = self.left.shape[1], self.right.shape[1]
        take_off(work[: n * m].view(n, m), self.left, self.right)

    def tensor(self) -> torch.Tensor:
        """Return it as a tensor of its own, (n, m)."""
        out = self.left.new_empty(self.left.shape[1], self.right.shape[1])
        product(self.left, self.right, 1.0, out)
        return out
