# SPDX-License-Identifier: Apache-2.0
"""Add up what all ranks have sent, rank by rank, with the same bits everywhere; merge what stands before it."""

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
        from sparsifiers.gpu.kernels.combining import launch_add

        launch_add(update, indices, values, counts, scale)
    else:
        add_reference(update, indices, values, counts, scale)


def add_reference(update: Tensor, indices: Tensor, values: Tensor, counts: Tensor, scale: float) -> None:
    """Add values of all ranks with torch's operations, some for each rank, for :func:`add_ranks`."""
    update.zero_()
    slot = torch.arange(indices.shape[1], device=update.device)
    for index, value, count in zip(indices, values, counts, strict=True):
        # Unique within a rank: the same sum in any order that a device takes. Unused entries add 0 to the first
        # element.
        live = slot < count
        update.index_add_(0, index * live, torch.where(live, value.to(torch.float32) * scale, 0.0))


def add_whole(update: Tensor, rows: Tensor, scale: float, *, factor: float = 1.0) -> None:
    """Write `factor` times the sum of `scale * row` over all W ranks, in the order of ranks, to `update`, fp32[n].

    rows: fp32, fp16 or bf16[W, n], any number of elements apart: slices of received messages. Each product is rounded
    to fp32, then each sum, and the product with `factor`. One launch; reads W times 2 or 4 bytes an element, writes 4.
    """
    if runs_triton(update):
        from sparsifiers.gpu.kernels.combining import launch_whole

        launch_whole(update, rows, scale, factor)
    else:
        whole_reference(update, rows, scale, factor)


def whole_reference(update: Tensor, rows: Tensor, scale: float, factor: float) -> None:
    """Add dense rows with torch's operations, some for each rank, for :func:`add_whole`."""
    first, *others = rows.to(update.dtype) * scale
    update.copy_(first)
    for row in others:
        update.add_(row)
    update.mul_(factor)


FIGURES = 4  # int64 each: a fault, a key, squares (float64), and a word that is 0
_FAULT, _KEY, _SQUARES, _LAST = range(FIGURES)


def merge_heads(
    words: Tensor, figures: Tensor, own: int, key: int, out: tuple[Tensor, Tensor], *, free: int, used: int
) -> None:
    """Write the words of all W ranks, OR-ed, and figures of all of them; nothing waits.

    words, figures: int32[W, n] and int64[W, FIGURES], rows any number of elements apart. own: a rank. key: int64.
    out: int32[n] and int64[FIGURES]. The fault is 1 + the last rank that has another word than `own` before number
    `used` but in number `free`, or 0; the squares are the sum of all ranks'. One launch.
    """
    if runs_triton(words):
        from sparsifiers.gpu.kernels.combining import launch_heads

        launch_heads(words, figures, own, key, out, free, used)
    else:
        heads_reference(words, figures, own, key, out, free, used)


def heads_reference(
    words: Tensor, figures: Tensor, own: int, key: int, out: tuple[Tensor, Tensor], free: int, used: int
) -> None:
    """Merge heads with torch's operations, for :func:`merge_heads`."""
    head, said = out
    differs = words != words[own]
    differs[:, free].zero_()
    differs[:, used:].zero_()
    numbers = torch.arange(1, len(words) + 1, device=words.device)
    said[_FAULT].copy_((differs.any(dim=1) * numbers).amax())
    said[_KEY].fill_(key)
    said[_SQUARES : _SQUARES + 1].view(torch.float64).copy_(figures[:, _SQUARES].view(torch.float64).sum())
    said[_LAST].zero_()
    while len(words) > 1:  # in halves; the middle one of an odd number is in both
        half = len(words) // 2
        words = words[: len(words) - half] | words[half:]
    head.copy_(words[0])
