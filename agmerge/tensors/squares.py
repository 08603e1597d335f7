# SPDX-License-Identifier: Apache-2.0
"""Sums of squares of tensors, added in one order, so that every processor gets the same bits."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsifiers import kernel

CLASSES, RUN = 16, 256  # as in kernel_squares.c
PART = 1 << 16  # elements that are widened at once, whole runs: they stay in the cache


def squares_of_all(tensors: Iterable[Tensor]) -> list[float | Tensor]:
    """Return the squares of ``tensors``, contiguous, in parts that add up to all of them; no device is waited for.

    One part is a number for each tensor of the host, see :func:`squares_of`; the other ones are 0-dim tensors, float64,
    one on each device.
    """
    found: list[float | Tensor] = []
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.device.type == "cpu":
            found.append(squares_of(tensor))
        elif tensor.numel():
            by_device.setdefault(tensor.device, []).append(_real(tensor))
    for group in by_device.values():
        norms = torch._foreach_norm(group, 2, dtype=torch.float64)  # of all in a few kernels
        found.append(torch.stack(norms).square().sum())
    return found


def squares_of(tensor: Tensor) -> float:
    """Return the sum of the squares of all elements of ``tensor``, as float64; for complex ones, of their magnitudes.

    It has the same bits on every processor: squares are float64, and added in a fixed order, without a temporary of the
    tensor's size. ``tensor``: of the host, contiguous. Squares of float64 are rounded; those of narrower dtypes are
    exact.
    """
    flat = _real(tensor)
    if flat.dtype in kernel.KINDS and kernel.plain(flat, dtype=flat.dtype):
        return _by_loops(flat)
    total = 0.0
    for part in torch.split(flat, PART):
        wide = part.float() if part.dtype in (torch.bfloat16, torch.float16) else part
        for run in _runs_of(wide).tolist():
            total += run
    return total


def _real(tensor: Tensor) -> Tensor:
    """Return all elements of ``tensor``, contiguous, 1-D: of complex ones both parts."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.detach().reshape(-1)


def _by_loops(flat: Tensor) -> float:
    """Return the sum of the squares of ``flat``, 1-D, by the compiled loops."""
    total: float = kernel.loaded().kernel_squares(flat.data_ptr(), flat.numel(), kernel.KINDS[flat.dtype])
    return total


def _runs_of(flat: Tensor) -> Tensor:
    """Return the sum of squares of each block of RUN elements of ``flat``, 1-D, as the loops add: float64[blocks]."""
    squares = pad(flat.to(torch.float64), (0, -flat.numel() % RUN)).square_().view(-1, RUN // CLASSES, CLASSES)
    classes = squares[:, 0]
    for row in range(1, RUN // CLASSES):
        classes = classes + squares[:, row]
    half = CLASSES
    while half > 1:
        half //= 2
        classes = classes[:, :half] + classes[:, half : 2 * half]
    return classes[:, 0]
