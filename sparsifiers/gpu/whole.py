# SPDX-License-Identifier: Apache-2.0
"""Add dense tensors of all ranks, rank by rank."""

from __future__ import annotations

from torch import Tensor

from sparsifiers.gpu.choice import runs_triton


def add_whole(update: Tensor, rows: Tensor, scale: float, *, factor: float = 1.0) -> None:
    """Write `factor` times the sum of `scale * row` over all W ranks, in the order of ranks, to `update`, fp32[n].

    rows: fp32, fp16 or bf16[W, n], any number of elements apart: slices of received messages. Each product is rounded
    to fp32, then each sum, and the product with `factor`. One launch; reads W times 2 or 4 bytes an element, writes 4.
    """
    if runs_triton(update):
        from sparsifiers.gpu.kernels import whole as kernel

        kernel.run(update, rows, scale, factor)
    else:
        reference(update, rows, scale, factor)


def reference(update: Tensor, rows: Tensor, scale: float, factor: float) -> None:
    """Add dense rows with torch's operations, some for each rank, for :func:`add_whole`."""
    first, *others = rows.to(update.dtype) * scale
    update.copy_(first)
    for row in others:
        update.add_(row)
    update.mul_(factor)
