# SPDX-License-Identifier: Apache-2.0
"""Products of thin factors and matrices, by compiled loops: one pass over a matrix, where torch needs several.

A matrix is (n, m); its factors are left (r, n) and right (r, m). All are float32, contiguous and in CPU memory, and
none shares storage with another. For others, and for factors of many rows, each function returns that it has done
nothing, and torch must do it.
`product` and `orthonormalize` give the same bits at every level, and with several of torch's threads, as agmerge's own
loops do. The others are left to torch where several of its threads are faster.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sparsifiers import native
from sparsifiers.native import ALONE, KINDS, address, plain

MOST = 128  # rows of a factor, as in kernel_low_rank.c
FEW = 16  # rows up to which a pass over a matrix is faster than torch's (measured)
NEAR = 1 << 15  # elements of a right factor up to which its subtraction is faster than torch's (measured)


def product(left: Tensor, right: Tensor, scale: float, out: Tensor) -> bool:
    """Write out = ((left[0] right[0] + left[1] right[1]) + ...) * scale, (n, m), each product rounded by itself.

    False, with nothing done, if torch must do it.
    """
    if not _factor(out, left, right, MOST):
        return False
    (r, n), m = left.shape, right.shape[1]
    return native.PRODUCT(left, n, right, m, r, scale, out) is not None


def orthonormalize(factors: Sequence[Tensor]) -> bool:
    """Make the rows of each factor, (r, length) with r <= length, orthonormal, in place: Gram-Schmidt, twice.

    Sums are of double precision. A row that is zero, not finite, or dependent on those before it becomes the unit
    vector with the smallest projection on these, less that projection. False, with nothing done, if torch must do it.
    """
    shapes = [tuple(factor.shape) for factor in factors]
    if not plain(*factors) or not all(len(shape) == 2 and shape[0] <= shape[1] for shape in shapes):
        return False
    if factors:
        pointers = np.array([factor.data_ptr() for factor in factors], dtype=np.uintp)
        sizes = np.array(shapes, dtype=np.int64)
        scratch = np.empty(max(map(sum, shapes)), dtype=np.float64)
        native.ORTHONORMALIZE(address(pointers), address(sizes), len(factors), address(scratch))
    return True


def project_on_right(matrix: Tensor, right: Tensor, out: Tensor) -> bool:
    """Write the left factor out = right matrix^T, (r, n); False, with nothing done, if torch must do it."""
    if not _factor_alone(matrix, out, right):
        return False
    (r, n), m = out.shape, right.shape[1]
    return native.PROJECT_ON_RIGHT(None, matrix, None, ALONE, n, m, right, r, out, 0, None) is not None


def project_on_left(matrix: Tensor, left: Tensor, out: Tensor) -> bool:
    """Write the right factor out = left matrix, (r, m); False, with nothing done, if torch must do it."""
    if not _factor_alone(matrix, left, out):
        return False
    (r, n), m = left.shape, out.shape[1]
    return native.PROJECT_ON_LEFT(None, matrix, None, ALONE, n, m, left, r, out, None) is not None


def take_off(matrix: Tensor, left: Tensor, right: Tensor) -> bool:
    """Subtract in place: matrix -= left^T right; False, with nothing done, if torch must do it."""
    if right.numel() > NEAR or not _factor_alone(matrix, left, right):
        return False
    (r, n), m = left.shape, right.shape[1]
    return native.TAKE_OFF(matrix, n, m, left, right, r) is not None


def add_and_project_on_right(
    matrix: Tensor, residual: Tensor, gradient: Tensor, right: Tensor, out: Tensor, copy: Tensor | None = None
) -> bool | None:
    """Write matrix = residual + gradient, past the caches, and out = right matrix^T; return whether it is finite.

    It has the bits of torch.add. gradient: float32, bfloat16 or float16. copy: float32 and as large, where one of
    float32 is copied to, too. None, with nothing done: torch must do it.
    """
    return _sum_on_right(matrix, residual, gradient, right, out, copy, False)


def add_project_on_right_and_take_off(
    matrix: Tensor, residual: Tensor, gradient: Tensor, right: Tensor, out: Tensor, copy: Tensor | None = None
) -> bool | None:
    """Write out = right sum^T and matrix = sum - out^T right of sum = residual + gradient, which is read once.

    Return whether all of the sum is finite; an element that is not makes its row not finite, and no other. gradient:
    float32, bfloat16 or float16. copy: see `add_and_project_on_right`. None, with nothing done: torch must do it.
    """
    return _sum_on_right(matrix, residual, gradient, right, out, copy, True)


def add_and_project_on_left(
    matrix: Tensor, residual: Tensor, gradient: Tensor, left: Tensor, out: Tensor, copy: Tensor | None = None
) -> bool | None:
    """Write matrix = residual + gradient, past the caches, and out = left matrix; return whether it is finite.

    It has the bits of torch.add. gradient and copy: see `add_and_project_on_right`. None, with nothing done: torch must
    do it.
    """
    if not _adds(matrix, residual, gradient, copy, left, out):
        return None
    sizes = KINDS[gradient.dtype], *matrix.shape
    endless = native.PROJECT_ON_LEFT(matrix, residual, gradient, *sizes, left, len(left), out, copy)
    return None if endless is None else not endless


def _sum_on_right(
    matrix: Tensor, residual: Tensor, gradient: Tensor, right: Tensor, out: Tensor, copy: Tensor | None, off: bool
) -> bool | None:
    if not _adds(matrix, residual, gradient, copy, out, right):
        return None
    sizes = KINDS[gradient.dtype], *matrix.shape
    endless = native.PROJECT_ON_RIGHT(matrix, residual, gradient, *sizes, right, len(right), out, off, copy)
    return None if endless is None else not endless


def _adds(matrix: Tensor, residual: Tensor, gradient: Tensor, copy: Tensor | None, left: Tensor, right: Tensor) -> bool:
    if copy is not None and (gradient.dtype != torch.float32 or copy.numel() != gradient.numel()):
        return False
    alike = matrix.shape == residual.shape == gradient.shape and gradient.dtype in KINDS
    return alike and _factor_alone(matrix, left, right)


def _factor(matrix: Tensor, left: Tensor, right: Tensor, most: int) -> bool:
    # No check here raises an error: errors are left to torch.
    if not left.dim() == right.dim() == matrix.dim() == 2:
        return False
    (r, n), (rows, m) = left.shape, right.shape
    return 0 < r == rows <= most and matrix.shape == (n, m)


def _factor_alone(matrix: Tensor, left: Tensor, right: Tensor) -> bool:
    return torch.get_num_threads() == 1 and _factor(matrix, left, right, FEW)
