# SPDX-License-Identifier: Apache-2.0
"""Take the elements above an edge, and the first of those on it: indices ascending, values beside them."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsifiers.gpu.bits import bits_of, pack_bits
from sparsifiers.gpu.choice import runs_triton
from sparsifiers.gpu.codec import encode_reference
from sparsifiers.gpu.digits import DIGITS, MASK
from sparsifiers.gpu.layout import IndexSection
from sparsifiers.gpu.scratch import Scratch
from sparsifiers.gpu.slots import Slots


def mark(work: Tensor, scratch: Scratch, section: IndexSection | None = None) -> None:
    """Write bitmaps of the elements of `work`, fp32[n], above the edge of one digit, and on it; count both by tile.

    section: its words are set to 0, as writing indices wants them. One launch; reads 4 and writes 0.25 bytes an
    element.
    """
    if runs_triton(work):
        from sparsifiers.gpu.kernels import compact as kernel

        kernel.run_mark(work, scratch, section)
    else:
        mark_reference(work, scratch, section)


def settle_ties(work: Tensor, scratch: Scratch) -> None:
    """Compare the ties of `mark`, on the edge of one digit, with that of all digits; correct both bitmaps and counts.

    One launch; reads 0.25 bytes an element and `work` where it lies on the edge, writes 0.25.
    """
    if runs_triton(work):
        from sparsifiers.gpu.kernels import compact as kernel

        kernel.run_settle(work, scratch)
    else:
        settle_reference(work, scratch)


def gather(
    work: Tensor,
    slots: Slots,
    scratch: Scratch,
    *,
    commit: bool,
    ties: bool = True,
    momentum: Tensor | None = None,
    section: IndexSection | None = None,
) -> None:
    """Write the marked elements of `work`, fp32[n], to `slots`: all that are above, and of ties as many as are wanted.

    Values are rounded to the dtype of `slots.values`; a finite one beyond its range becomes its largest number, and
    others become NaN where the dtype is narrower. At most as many are written as there are slots.

    commit: subtract written values from `work`. ties: False where only `above` was marked. momentum: fp32[n],
    multiplied by 0 where a subtracted value is not 0. section: the indices are written there, too; its words are 0
    before.

    Two launches; reads 0.25 bytes an element; 72 bytes a slot, most of them around single elements of `work`.
    """
    if runs_triton(work):
        from sparsifiers.gpu.kernels import compact as kernel

        kernel.run_gather(work, slots, scratch, commit, ties, momentum, section)
    else:
        gather_reference(work, slots, scratch, commit, ties, momentum, section)


def mark_reference(work: Tensor, scratch: Scratch, section: IndexSection | None) -> None:
    """Write bitmaps of one digit with torch's operations, for :func:`mark`."""
    keys = work.view(torch.int32) & MASK
    digit = keys >> DIGITS[0].shift
    _write_marks(digit > scratch.edge[0], digit == scratch.edge[0], scratch)
    if section is not None:
        section.words.zero_()


def settle_reference(work: Tensor, scratch: Scratch) -> None:
    """Correct bitmaps by all digits with torch's operations, for :func:`settle_ties`."""
    keys = work.view(torch.int32) & MASK
    above, ties = (bits_of(words)[: len(work)] > 0 for words in (scratch.above, scratch.ties))
    _write_marks(above | (ties & (keys > scratch.edge[0])), ties & (keys == scratch.edge[0]), scratch)


def _write_marks(above: Tensor, ties: Tensor, scratch: Scratch) -> None:
    """Write both bitmaps, bool[n], and their counts."""
    for place, (flags, words) in enumerate([(above, scratch.above), (ties, scratch.ties)]):
        pack_bits(flags, words)
        scratch.counts[:, place] = bits_of(words).view(scratch.tiles, -1).sum(1)


def gather_reference(
    work: Tensor,
    slots: Slots,
    scratch: Scratch,
    commit: bool,
    ties: bool,
    momentum: Tensor | None,
    section: IndexSection | None,
) -> None:
    """Write marked elements to slots with torch's operations, for :func:`gather`."""
    capacity = len(slots.indices)
    taken = bits_of(scratch.above)[: len(work)] > 0
    if ties:
        tie = bits_of(scratch.ties)[: len(work)] > 0
        taken = taken | (tie & (tie.cumsum(0) <= scratch.edge[1]))
    ranks = taken.cumsum(0)
    slots.count.copy_(ranks[-1].clamp(max=capacity))
    # Elements without a slot fall behind the last one.
    places = torch.where(taken & (ranks <= capacity), ranks - 1, capacity)
    indices = torch.zeros(capacity + 1, dtype=torch.int32, device=work.device)
    indices.scatter_(0, places, torch.arange(len(work), dtype=torch.int32, device=work.device))
    live = torch.arange(capacity, device=work.device) < slots.count
    slots.indices.copy_(indices[:-1] * live)
    values = torch.where(live, work[slots.indices.long()], 0.0)
    slots.values.copy_(saturated(values, slots.values.dtype))
    if commit:
        off = slots.values.to(torch.float32)  # 0 where not live: the index of an empty slot may be another's
        work.index_add_(0, slots.indices, off, alpha=-1)
        if momentum is not None:
            momentum.scatter_reduce_(0, slots.indices.long(), (off == 0).to(momentum.dtype), "prod")
    if section is not None:
        encode_reference(slots.indices, slots.count, section)


def saturated(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return fp32 `values` within the range of `dtype`; where that is narrower, NaN if not finite."""
    limit = torch.finfo(dtype).max
    return values if dtype == torch.float32 else values.clamp(-limit, limit).add_(values, alpha=0.0)
