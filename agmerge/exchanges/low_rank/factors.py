"""Factorise matrices: the mathematics of PowerSGD (Vogels et al., 2019) and ACP-SGD (Zhang et al., 2023) on a page.

A tensor of two or more dimensions is a matrix D, (n, m): its first dimension by all others. It is sent as two factors,
left (r, n) and right (r, m), which stand for left^T right. A factor lies in memory row by row, each row a vector as
long as a column, or a row, of the matrix. One of them is a basis, with orthonormal rows, that all ranks have in common;
the other one is what a rank finds when it projects its own matrix on that. What all ranks compute of the same factors,
:func:`product` and :func:`orthonormalize`, has the same bits on every processor.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np
import torch

from agmerge.exchanges.low_rank.orthonormal import orthonormalize
from sparsifiers import kernel_low_rank

__all__ = [
    "LEFT",
    "RIGHT",
    "add_and_project_on_left",
    "add_and_project_on_right",
    "add_project_on_right_and_take_off",
    "initial_basis",
    "matrix_shape",
    "orthonormalize",
    "product",
    "project_on_left",
    "project_on_right",
    "rank_of",
    "saves",
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


def saves(shape: Sequence[int], rank: int) -> bool:
    """Tell whether a tensor's two factors have fewer elements than it has itself."""
    if len(shape) < 2:
        return False
    n, m = matrix_shape(shape)
    return rank_of(shape, rank) * (n + m) < n * m


def initial_basis(seed: int, name: str, length: int, rank: int) -> torch.Tensor:
    """Return orthonormal rows, float32 (rank, length), that depend on ``seed``, ``name`` and these sizes alone."""
    generator = np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))
    basis = torch.from_numpy(generator.random((rank, length)).astype(np.float32)).mul_(2).sub_(1)
    orthonormalize([basis])
    return basis


def project_on_right(matrix: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """Write the left factor, ``out`` (r, n), of ``matrix`` (n, m) for a basis ``right`` (r, m)."""
    if not kernel_low_rank.project_on_right(matrix, right, out):
        torch.mm(right, matrix.t(), out=out)


def project_on_left(matrix: torch.Tensor, left: torch.Tensor, out: torch.Tensor) -> None:
    """Write the right factor, ``out`` (r, m), of ``matrix`` (n, m) for a basis ``left`` (r, n)."""
    if not kernel_low_rank.project_on_left(matrix, left, out):
        torch.mm(left, matrix, out=out)


def take_off(matrix: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Subtract what two factors stand for: ``matrix -= left^T right``, in place."""
    if not kernel_low_rank.take_off(matrix, left, right):
        matrix.addmm_(left.t(), right, alpha=-1)


def add_and_project_on_right(
    matrix: torch.Tensor, residual: torch.Tensor, gradient: torch.Tensor, right: torch.Tensor, out: torch.Tensor
) -> bool | None:
    """Write ``matrix = residual + gradient`` and project it on the right, in one pass where the loops can.

    Return whether all of the sum is finite; None: not known. All but ``right`` and ``out`` are (n, m), see
    :func:`project_on_right`.
    """
    finite = kernel_low_rank.add_and_project_on_right(matrix, residual, gradient, right, out)
    if finite is None:
        torch.add(residual, gradient, out=matrix)
        project_on_right(matrix, right, out)
    return finite


def add_and_project_on_left(
    matrix: torch.Tensor, residual: torch.Tensor, gradient: torch.Tensor, left: torch.Tensor, out: torch.Tensor
) -> bool | None:
    """Write ``matrix = residual + gradient`` and project it on the left, in one pass where the loops can.

    Return whether all of the sum is finite; None: not known. All but ``left`` and ``out`` are (n, m), see
    :func:`project_on_left`.
    """
    finite = kernel_low_rank.add_and_project_on_left(matrix, residual, gradient, left, out)
    if finite is None:
        torch.add(residual, gradient, out=matrix)
        project_on_left(matrix, left, out)
    return finite


def add_project_on_right_and_take_off(
    matrix: torch.Tensor, residual: torch.Tensor, gradient: torch.Tensor, right: torch.Tensor, out: torch.Tensor
) -> bool | None:
    """Write the left factor ``out`` (r, n) of ``residual + gradient``, and in ``matrix`` what it leaves of that sum.

    That is ``matrix = residual + gradient - out^T right``, in one pass where the loops can. Return whether all of the
    sum is finite; None: not known.
    """
    finite = kernel_low_rank.add_project_on_right_and_take_off(matrix, residual, gradient, right, out)
    if finite is None:
        torch.add(residual, gradient, out=matrix)
        project_on_right(matrix, right, out)
        take_off(matrix, out, right)
    return finite


def product(left: torch.Tensor, right: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """Write ``out = scale * left^T right``, (n, m), added up in one order, each product rounded by itself.

    Where a library chooses the order, as in a product of matrices, ranks on unlike processors drift apart.
    """
    if kernel_low_rank.product(left, right, scale, out):
        return
    n, m = out.shape
    rows = max(1, CACHED // m) if out.device.type == "cpu" else n
    for first in range(0, n, rows):
        part, columns = out[first : first + rows], left[:, first : first + rows].unsqueeze(2)
        torch.mul(columns[0], right[0], out=part)
        for column, row in zip(columns[1:], right[1:], strict=True):
            part += column * row
        part *= scale
