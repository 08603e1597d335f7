# SPDX-License-Identifier: Apache-2.0
"""Add the values that all ranks have sent, rank by rank: the same bits on every rank and in every run."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsifiers.gpu.choice import runs_triton


def add_ranks(update: Tensor, indices: Tensor, values: Tensor, counts: Tensor, scale: float) -> None:
    """Write the sum of `scale * values` of all W ranks, in the order of ranks, to `update`, fp32[n], and 0 elsewhere.

    Each product is rounded to fp32, and then each sum. indices: int32[W, capacity], ascending in each rank's first
    `counts`; values: fp32, fp16 or bf16[W, capacity]; counts: int32[W], of any stride. Rows of all may be any number of
    elements apart: slices of received messages. Indices that do not ascend, or lie outside, leave `update` with any
    values, and write nowhere else.

    One launch; writes 4 bytes an element, and reads 8 to 12 and changes 8 a value. No atomic operations.
    """
    if runs_triton(update):
        from sparsifiers.gpu.kernels import add as kernel

        kernel.run(update, indices, values, counts, scale)
    else:
        reference(update, indices, values, counts, scale)


def reference(update: Tensor, indices: Tensor, values: Tensor, counts: Tensor, scale: float) -> None:
    """Add values of all ranks with torch's operations, some for each rank, for :func:`add_ranks`."""
    update.zero_()
    slot = torch.arange(indices.shape[1], device=update.device)
    for index, value, count in zip(indices, values, counts, strict=True):
        # Unique within a rank: the same sum in any order that a device takes. Unused entries add 0 to the first
        # element.
        live = slot < count
        update.index_add_(0, index * live, torch.where(live, value.to(torch.float32) * scale, 0.0))
