# SPDX-License-Identifier: Apache-2.0
"""Select from a vector on a device in few launches, into slots that may lie in a message."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsifiers.gpu.choice import runs_triton
from sparsifiers.gpu.codec import bits_of, encode_reference, pack_bits
from sparsifiers.gpu.compensation import histogram_of
from sparsifiers.gpu.layout import IndexSection, Slots
from sparsifiers.gpu.scratch import DIGITS, MASK, Scratch
from sparsifiers.gpu.tables import RowTable
from sparsifiers.rows import deal, table, top

# Find the edge of a selection: the leading bits of the k-th largest key, digit by digit, from histograms.


def count_digits(work: Tensor, scratch: Scratch) -> None:
    """Add to the histogram the first digits of the keys of `work`, fp32[n], which `compensate` has not written.

    One launch; reads 4 bytes an element.
    """
    if runs_triton(work):
        from sparsifiers.gpu.kernels.edge import launch_count_digits

        launch_count_digits(work, scratch)
    else:
        count_digits_reference(work, scratch)
    scratch.count()


def count_ties(work: Tensor, level: int, scratch: Scratch) -> None:
    """Add to the histogram the digit `level` of those elements of `work`, fp32[n], that `mark` has found on the edge.

    Of these only where the digits before this one are the edge's. One launch; reads 0.125 bytes an element, and `work`
    where it lies on the edge.
    """
    if runs_triton(work):
        from sparsifiers.gpu.kernels.edge import launch_count_ties

        launch_count_ties(work, level, scratch)
    else:
        count_ties_reference(work, level, scratch)


def find_edge(k: int, level: int, scratch: Scratch) -> None:
    """Find the digit `level` of the k-th largest key in the histogram, append it to the edge, and clear the histogram.

    Afterwards `edge` holds the digits up to this one, and how many of the elements with these are among the k largest:
    1 or more, since all larger ones are fewer than k. It may be more than there are, where k exceeds the count.
    k: of the first level, where the edge is found anew. One launch; 16 KB.
    """
    if runs_triton(scratch.histogram):
        from sparsifiers.gpu.kernels.edge import launch_find_edge

        launch_find_edge(k, level, scratch)
    else:
        find_edge_reference(k, level, scratch)
    scratch.spend()


def count_digits_reference(work: Tensor, scratch: Scratch) -> None:
    """Count first digits with torch's operations, for :func:`count_digits`."""
    scratch.histogram.add_(histogram_of((work.view(torch.int32) & MASK) >> DIGITS[0].shift))


def count_ties_reference(work: Tensor, level: int, scratch: Scratch) -> None:
    """Count a digit of ties with torch's operations, for :func:`count_ties`."""
    shift, bits = DIGITS[level]
    keys = work.view(torch.int32) & MASK
    counted = (bits_of(scratch.ties)[: len(work)] > 0) & (keys >> shift + bits == scratch.edge[0])
    # Elements that do not count fall behind the last bin.
    bins = len(scratch.histogram)
    digits = torch.where(counted, keys >> shift & (1 << bits) - 1, bins)
    counts = torch.zeros(bins + 1, dtype=torch.int32, device=work.device)
    scratch.histogram.add_(counts.index_add_(0, digits, counted.to(torch.int32))[:-1])


def find_edge_reference(k: int, level: int, scratch: Scratch) -> None:
    """Find a digit of the edge with torch's operations, for :func:`find_edge`."""
    counts = scratch.histogram.long()
    room = scratch.edge[1] if level else torch.full((), k, dtype=torch.int32, device=counts.device)
    from_top = counts.flip(0).cumsum(0).flip(0)  # of this digit or a larger one
    digit = ((from_top >= room).sum() - 1).clamp_(min=0)
    larger = torch.where(torch.arange(len(counts), device=counts.device) > digit, counts, 0).sum()
    prefix = (scratch.edge[0].long() << DIGITS[level].bits) + digit if level else digit
    scratch.edge.copy_(torch.stack([prefix, room - larger, scratch.edge[2] if level else digit]))
    scratch.histogram.zero_()


# Take the elements above an edge, and the first of those on it: indices ascending, values beside them.


def mark(work: Tensor, scratch: Scratch, section: IndexSection | None = None) -> None:
    """Write bitmaps of the elements of `work`, fp32[n], above the edge of one digit, and on it; count both by tile.

    section: its words are set to 0, as writing indices wants them. One launch; reads 4 and writes 0.25 bytes an
    element.
    """
    if runs_triton(work):
        from sparsifiers.gpu.kernels.compact import launch_mark

        launch_mark(work, scratch, section)
    else:
        mark_reference(work, scratch, section)


def settle_ties(work: Tensor, scratch: Scratch) -> None:
    """Compare the ties of `mark`, on the edge of one digit, with that of all digits; correct both bitmaps and counts.

    One launch; reads 0.25 bytes an element and `work` where it lies on the edge, writes 0.25.
    """
    if runs_triton(work):
        from sparsifiers.gpu.kernels.compact import launch_settle

        launch_settle(work, scratch)
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
        from sparsifiers.gpu.kernels.compact import launch_gather

        launch_gather(work, slots, scratch, commit, ties, momentum, section)
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


# Write a bitmap of the largest of each row of a segment's tensors, as many as each row is dealt.


def mark_rows(
    work: Tensor,
    rows: RowTable,
    k: int,
    turn: int,
    scratch: Scratch,
    section: IndexSection | None = None,
) -> None:
    """Set in `scratch.above` the bits of the largest of each row of `work`, fp32[n], k in all; of equals the first.

    k, turn: see `sparsifiers.rows.deal`. section: see `mark`. Ties are not used: `gather` gets ties=False.
    Two launches, one of which clears the marks, a third for a section, and one copy of 12 bytes a tensor; reads a row
    five times (with Triton before 3.8 eight times), and the device once or, where a panel of eight rows does not stay
    in its cache, each time: 4 to 20 bytes an element, or to 32.
    """
    scratch.clear()
    if section is not None:
        section.words.zero_()
    if runs_triton(work):
        from sparsifiers.gpu.kernels.rows import launch_rows

        launch_rows(work, rows, rows.shares(k, turn), scratch)
    else:
        rows_reference(work, rows, k, turn, scratch)


def rows_reference(work: Tensor, rows: RowTable, k: int, turn: int, scratch: Scratch) -> None:
    """Set the bits of the largest of rows with torch's operations, for :func:`mark_rows`."""
    keys = work.view(torch.int32) & MASK
    taken = torch.zeros_like(keys, dtype=torch.bool)
    for share in deal(rows.tensors, k, turn):
        if share.count:
            each, more = divmod(share.count, share.matrix.rows)
            turned = (torch.arange(share.matrix.rows, device=keys.device) - share.start) % share.matrix.rows
            quotas = (turned < more) + each
            table(taken, share.matrix)[:] = top(table(keys, share.matrix), quotas, each + (more > 0))
    pack_bits(taken, scratch.above)
    scratch.counts[:, 0] = bits_of(scratch.above).view(scratch.tiles, -1).sum(1)


# Whole selections.


def select_largest(
    work: Tensor,
    k: int,
    scratch: Scratch,
    slots: Slots,
    section: IndexSection | None = None,
    *,
    exact: bool,
    commit: bool,
    momentum: Tensor | None = None,
) -> None:
    """Take the k largest magnitudes of `work`, fp32[n]: 1 <= k <= n, at most as many as there are slots; zeros, too.

    exact: the k largest, of equals those of lowest index, as `topk` selects. Else all that are larger than
    the k-th by an eighth of an octave, and of those in the k-th one's bin the first; a function of the bits alone.
    commit, momentum, section: see `gather`.

    4 launches, exact 9, one more unless `compensate` has just counted the first digits of `work`; 4.5 bytes an element,
    about 1 more if exact, 4 more if not counted.
    """
    if not scratch.is_counted:
        count_digits(work, scratch)
    find_edge(k, 0, scratch)
    mark(work, scratch, section)
    if exact:
        for level in range(1, len(DIGITS)):
            count_ties(work, level, scratch)
            find_edge(k, level, scratch)
        settle_ties(work, scratch)
    gather(work, slots, scratch, commit=commit, momentum=momentum, section=section)


def select_rows(
    work: Tensor,
    rows: RowTable,
    k: int,
    turn: int,
    scratch: Scratch,
    slots: Slots,
    section: IndexSection | None = None,
    *,
    commit: bool,
    momentum: Tensor | None = None,
) -> None:
    """Take the largest of each row of `work`, fp32[n], k in all, as `adtopk-row` deals them: the count is k.

    turn: see `mark_rows`; commit, momentum, section: see `gather`. 4 launches, 5 with a section, and a copy of 12 bytes
    a tensor; 4.5 to 20.5 bytes an element.
    """
    mark_rows(work, rows, k, turn, scratch, section)
    gather(work, slots, scratch, commit=commit, ties=False, momentum=momentum, section=section)
