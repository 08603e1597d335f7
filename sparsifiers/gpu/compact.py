"""Take what lies above an edge, and of what lies on it the first: indices ascending, values beside them."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsifiers.gpu.choice import runs_triton
from sparsifiers.gpu.digits import DIGITS, MASK
from sparsifiers.gpu.scratch import Scratch
from sparsifiers.gpu.slots import Slots


def mark(work: Tensor, level: int, least: int, scratch: Scratch) -> None:
    """Mark all elements of `work`, fp32[n], above the edge, and those on it, and count both in each tile.

    level: of the edge's last digit. least: the smallest key that may be on it: 1 leaves zeros out. One launch; reads 4
    and writes 0.25 bytes an element.
    """
    if runs_triton(work):
        from sparsifiers.gpu.kernels import compact as kernel

        kernel.run_mark(work, level, least, scratch)
    else:
        mark_reference(work, level, least, scratch)


def gather(
    work: Tensor,
    slots: Slots,
    scratch: Scratch,
    *,
    commit: bool,
    ties: bool = True,
    momentum: Tensor | None = None,
    clear: Tensor | None = None,
) -> None:
    """Write the marked elements of `work`, fp32[n], to `slots`: all that are above, and of ties as many as are wanted.

    Values are rounded to the dtype of `slots.values`; a finite one beyond its range becomes its largest number, and
    what is not finite becomes NaN where the dtype is narrower. At most as many are written as there are slots.

    commit: take what was written off `work`. ties: False where only `above` was marked. momentum: fp32[n], multiplied
    by 0 where what was taken off is not 0. clear: int32 words that are set to 0, as `encode_indices` wants them.

    Two launches; reads 0.25 bytes an element and 12 a slot, writes 12 a slot.
    """
    if runs_triton(work):
        from sparsifiers.gpu.kernels import compact as kernel

        kernel.run_gather(work, slots, scratch, commit, ties, momentum, clear)
    else:
        gather_reference(work, slots, scratch, commit, ties, momentum, clear)


def commit(work: Tensor, slots: Slots, sent: Tensor, momentum: Tensor | None = None) -> None:
    """Take `sent`, of any float dtype, (capacity,), off `work`, fp32[n], at the indices of `slots` that are in use.

    It is for codecs that round more than a cast; `gather` does it for others. momentum: as there. One launch; 16 bytes
    a slot.
    """
    if runs_triton(work):
        from sparsifiers.gpu.kernels import compact as kernel

        kernel.run_commit(work, slots, sent, momentum)
    else:
        commit_reference(work, slots, sent, momentum)


def mark_reference(work: Tensor, level: int, least: int, scratch: Scratch) -> None:
    """Do what :func:`mark` does with torch's operations."""
    keys = work.view(torch.int32) & MASK
    leading = keys >> DIGITS[level].shift
    pack_bits(leading > scratch.edge[0], scratch.above)
    pack_bits((leading == scratch.edge[0]) & (keys >= least), scratch.ties)
    for place, words in enumerate((scratch.above, scratch.ties)):
        scratch.counts[:, place] = bits_of(words).view(scratch.tiles, -1).sum(1)


def gather_reference(
    work: Tensor,
    slots: Slots,
    scratch: Scratch,
    commit: bool,
    ties: bool,
    momentum: Tensor | None,
    clear: Tensor | None,
) -> None:
    """Do what :func:`gather` does with torch's operations."""
    capacity = len(slots.indices)
    taken = bits_of(scratch.above)[: len(work)] > 0
    if ties:
        tie = bits_of(scratch.ties)[: len(work)] > 0
        taken = taken | (tie & (tie.cumsum(0) <= scratch.edge[1]))
    ranks = taken.cumsum(0)
    slots.count.copy_(ranks[-1].clamp(max=capacity))
    # What has no slot falls behind the last one.
    places = torch.where(taken & (ranks <= capacity), ranks - 1, capacity)
    indices = torch.zeros(capacity + 1, dtype=torch.int32, device=work.device)
    indices.scatter_(0, places, torch.arange(len(work), dtype=torch.int32, device=work.device))
    live = torch.arange(capacity, device=work.device) < slots.count
    slots.indices.copy_(indices[:-1] * live)
    values = torch.where(live, work[slots.indices.long()], 0.0)
    slots.values.copy_(saturated(values, slots.values.dtype))
    if commit:
        commit_reference(work, slots, slots.values, momentum)
    if clear is not None:
        clear.zero_()


def commit_reference(work: Tensor, slots: Slots, sent: Tensor, momentum: Tensor | None) -> None:
    """Do what :func:`commit` does with torch's operations."""
    live = torch.arange(len(slots.indices), device=work.device) < slots.count
    off = torch.where(live, sent.to(torch.float32), 0.0)
    work.index_add_(0, slots.indices, off, alpha=-1)
    if momentum is not None:
        momentum.scatter_reduce_(0, slots.indices.long(), (off == 0).to(momentum.dtype), "prod")


def saturated(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return fp32 `values` within the range of `dtype`, and NaN for what is not finite where that is narrower."""
    limit = torch.finfo(dtype).max
    return values if dtype == torch.float32 else values.clamp(-limit, limit).add_(values, alpha=0.0)


def pack_bits(flags: Tensor, words: Tensor) -> None:
    """Write bool[n] into int32 words, the first in the lowest bit; the bits behind them are 0."""
    spread = torch.zeros(32 * len(words), dtype=torch.int32, device=words.device)
    spread[: len(flags)] = flags
    lanes = torch.arange(32, dtype=torch.int32, device=words.device)
    words.copy_((spread.view(-1, 32) << lanes).sum(1, dtype=torch.int32))


def bits_of(words: Tensor) -> Tensor:
    """Return the bits of int32 words along the last dimension, the lowest first: int32[..., 32 * words]."""
    lanes = torch.arange(32, dtype=torch.int32, device=words.device)
    return (words[..., None] >> lanes & 1).flatten(-2)
