# SPDX-License-Identifier: Apache-2.0
"""Add the gradients of a merge buffer to its residual, and take the histogram that selection begins with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsifiers.gpu.choice import runs_triton
from sparsifiers.gpu.scratch import BINS, DIGITS, MASK, LargestKey, Scratch
from sparsifiers.gpu.tables import Momenta, TensorTable


def compensate(
    table: TensorTable,
    gradients: Sequence[Tensor | None],
    residual: Tensor | None,
    work: Tensor,
    *,
    largest: LargestKey | None = None,
    scratch: Scratch | None = None,
    momenta: Momenta | None = None,
) -> None:
    """Write `work = residual + gradient` for all tensors of `table`; padding between them is left as it is.

    gradients: one a tensor, fp32, fp16 or bf16; None: the tensor got none. residual: fp32[n], not `work`; None: there
    is none. work: fp32[n]. largest: raised to the largest key that is written. scratch: of `work`; the first digits of
    all keys written are counted into its histogram. None: neither. momenta: as the memory `dgc` has it, without
    clipping.

    One launch and one copy of 8 bytes a tensor; nothing waits. fp32: reads 8 and writes 4 bytes an element; with
    `momenta` 12 and 8. ValueError for tensors that do not fit.
    """
    dtype = table.check(gradients)
    if runs_triton(work):
        from sparsifiers.gpu.kernels.compensation import launch_compensate

        launch_compensate(table, gradients, dtype, residual, work, largest, scratch, momenta)
    else:
        compensate_reference(table, gradients, residual, work, largest, scratch, momenta)
    if scratch is not None:
        scratch.count()
    if largest is not None:
        largest.use()


def compensate_reference(
    table: TensorTable,
    gradients: Sequence[Tensor | None],
    residual: Tensor | None,
    work: Tensor,
    largest: LargestKey | None,
    scratch: Scratch | None,
    momenta: Momenta | None,
) -> None:
    """Add gradients with torch's operations, some for each tensor, for :func:`compensate`; nothing waits."""
    if largest is not None:
        largest.later.zero_()
    for gradient, offset, length in zip(gradients, table.offsets, table.lengths, strict=True):
        place = slice(offset, offset + length)
        total = None if gradient is None else gradient.reshape(-1).to(torch.float32)
        if momenta is not None:
            total = _with_momentum(total, momenta, place)
        if residual is not None:
            total = residual[place] if total is None else total + residual[place]
        written = work[place].zero_() if total is None else work[place].copy_(total)
        keys = written.view(torch.int32) & MASK
        if scratch is not None:
            scratch.histogram.add_(histogram_of(keys >> DIGITS[0].shift))
        if largest is not None and length:
            largest.now.copy_(torch.maximum(largest.now, keys.max()))


def histogram_of(bins: Tensor) -> Tensor:
    """Return how often each of `BINS` numbers occurs: int32[BINS]. Nothing waits."""
    ones = torch.ones_like(bins, dtype=torch.int32)
    return torch.zeros(BINS, dtype=torch.int32, device=bins.device).index_add_(0, bins, ones)


def _with_momentum(gradient: Tensor | None, momenta: Momenta, place: slice) -> Tensor:
    """Write the momentum after this step, and return the summand for the residual."""
    before, after = momenta.before[place], momenta.after[place]
    gradient = torch.zeros_like(before) if gradient is None else gradient
    if momenta.nesterov:
        return torch.add(before, gradient, out=after).mul_(momenta.factor) + gradient
    return torch.mul(before, momenta.factor, out=after).add_(gradient)
