# SPDX-License-Identifier: Apache-2.0
"""Write bitmaps of selected elements, scan their counts, and compact from the bitmaps (K3, without spinning)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsifiers.gpu.kernels.codec import set_index
from sparsifiers.gpu.kernels.edge import keys_of, lowest, ones_in, turns
from sparsifiers.gpu.kernels.launching import launch, power
from sparsifiers.gpu.layout import IndexSection, Slots
from sparsifiers.gpu.scratch import DIGITS, TILE, Scratch

SCANNED = 2048  # tiles at once
WALKERS = TILE // 32 // 32  # warps that walk a tile's bitmap: a thread a word


@triton.jit
def mark_kernel(
    work: tl.tensor, edge: tl.tensor, above: tl.tensor, ties: tl.tensor, counts: tl.tensor, clear: tl.tensor,
    length: tl.tensor, cleared: tl.tensor,
    SHIFT: tl.constexpr, TILE: tl.constexpr, CLEARED: tl.constexpr,
) -> None:  # fmt: skip
    """Write the bitmaps of one tile, and clear `CLEARED` words."""
    tile = tl.program_id(0)
    words = tl.arange(0, TILE // 32)
    classes = tl.arange(0, 32)[None, :]
    places = words[:, None] * 32 + classes
    left = length - tile * TILE
    keys = keys_of(work + tile * TILE, places, left, TILE)
    prefix = tl.load(edge)
    is_above = ((keys >> SHIFT) > prefix).to(tl.int32)  # never so behind the end, where keys are 0
    is_tie = (((keys >> SHIFT) == prefix) & (places < left)).to(tl.int32)
    tl.store(above + tile * (TILE // 32) + words, tl.sum(is_above << classes, 1))
    tl.store(ties + tile * (TILE // 32) + words, tl.sum(is_tie << classes, 1))
    tl.store(counts + 2 * tile, tl.sum(tl.sum(is_above, 1), 0))
    tl.store(counts + 2 * tile + 1, tl.sum(tl.sum(is_tie, 1), 0))
    if CLEARED > 0:
        word = tile * CLEARED + tl.arange(0, CLEARED)
        tl.store(clear + word, tl.zeros([CLEARED], tl.int32), mask=word < cleared)


@triton.jit
def settle_kernel(
    work: tl.tensor, edge: tl.tensor, above: tl.tensor, ties: tl.tensor, counts: tl.tensor, TILE: tl.constexpr
) -> None:
    """Compare the ties of one tile with the whole key that is the edge."""
    tile = tl.program_id(0)
    if tl.load(counts + 2 * tile + 1) > 0:
        at = tile * (TILE // 32) + tl.arange(0, TILE // 32)
        left = tl.load(ties + at)
        now_above = tl.load(above + at)
        now_ties = left * 0
        bound = tl.load(edge)
        for _ in range(turns(left)):
            bit = lowest(left)
            place = at * 32 + ones_in(bit - 1)
            key = tl.load(work + place, mask=left != 0, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
            now_above |= tl.where(key > bound, bit, 0)  # of words that are through it is 0
            now_ties |= tl.where(key == bound, bit, 0)
            left = left & (left - 1)
        tl.store(above + at, now_above)
        tl.store(ties + at, now_ties)
        tl.store(counts + 2 * tile, tl.sum(ones_in(now_above), 0))
        tl.store(counts + 2 * tile + 1, tl.sum(ones_in(now_ties), 0))


@triton.jit
def scan_kernel(
    counts: tl.tensor, edge: tl.tensor, count: tl.tensor, tiles: tl.tensor, capacity: tl.tensor,
    TIES: tl.constexpr, SCANNED: tl.constexpr,
) -> None:  # fmt: skip
    """Turn the counts of tiles into counts of the elements before each; a single program does it, chunk by chunk."""
    room = tl.load(edge + 1) if TIES else 0
    above_before = 0
    ties_before = 0
    for first in range(0, tiles, SCANNED):
        tile = first + tl.arange(0, SCANNED)
        above = tl.load(counts + 2 * tile, mask=tile < tiles, other=0)
        ties = tl.load(counts + 2 * tile + 1, mask=tile < tiles, other=0)
        tl.store(counts + 2 * tile, above_before + tl.cumsum(above, 0) - above, mask=tile < tiles)
        tl.store(counts + 2 * tile + 1, ties_before + tl.cumsum(ties, 0) - ties, mask=tile < tiles)
        above_before += tl.sum(above, 0)
        ties_before += tl.sum(ties, 0)
    taken = above_before + tl.minimum(ties_before, room)
    tl.store(count, tl.minimum(taken, capacity))


@triton.jit
def clear_momentum(momentum: tl.tensor, sent: tl.tensor, live: tl.tensor) -> None:
    """Multiply the momentum by 0 where a value was sent."""
    kept = tl.load(momentum, mask=live, other=0.0) * tl.where(sent == 0.0, 1.0, 0.0)
    tl.store(momentum, kept, mask=live)


@triton.jit
def gather_kernel(
    work: tl.tensor, momentum: tl.tensor, above: tl.tensor, ties: tl.tensor, counts: tl.tensor, edge: tl.tensor,
    count: tl.tensor, indices: tl.tensor, values: tl.tensor, capacity: tl.tensor, words: tl.tensor,
    at16: tl.tensor, at8: tl.tensor, at4: tl.tensor, at2: tl.tensor, unary: tl.tensor,
    COMMIT: tl.constexpr, MASKED: tl.constexpr, TIES: tl.constexpr, LIMIT: tl.constexpr, TILE: tl.constexpr,
    SPAN: tl.constexpr, CODED: tl.constexpr, LOW: tl.constexpr,
) -> None:  # fmt: skip
    """Write the slots of one tile, and `SPAN` slots of those that are not in use."""
    tile = tl.program_id(0)
    room = tl.load(edge + 1) if TIES else 0
    at = tile * (TILE // 32) + tl.arange(0, TILE // 32)
    is_above = tl.load(above + at)
    is_tie = tl.load(ties + at) if TIES else is_above * 0
    # One scan of both: a tile has fewer than 2**15 elements, so neither half runs over.
    both = ones_in(is_above) + (ones_in(is_tie) << 16)
    earlier = tl.cumsum(both, 0) - both
    before = tl.load(counts + 2 * tile) + (earlier & 0xFFFF)
    ties_before = tl.load(counts + 2 * tile + 1) + (earlier >> 16)
    left = is_above | is_tie
    for _ in range(turns(left)):
        bit = lowest(left)
        live = left != 0
        place = at * 32 + ones_in(bit - 1)
        slot = before + ones_in(is_above & (bit - 1))
        if TIES:
            tie_rank = ties_before + ones_in(is_tie & (bit - 1))
            live = live & (((is_tie & bit) == 0) | (tie_rank < room))
            slot += tl.minimum(tie_rank, room)
        live = live & (slot < capacity)
        held = tl.load(work + place, mask=live, other=0.0)
        value = held
        if LIMIT > 0:
            inside = tl.where(held > LIMIT, LIMIT, tl.where(held < -LIMIT, -LIMIT, held))
            value = inside + held * 0.0  # NaN for values that are not finite
        rounded = value.to(values.dtype.element_ty)
        tl.store(indices + slot, place, mask=live)
        tl.store(values + slot, rounded, mask=live)
        if CODED:
            set_index(words, at16, at8, at4, at2, unary, slot, place, live, LOW)
        if COMMIT:
            sent = rounded.to(tl.float32)
            tl.store(work + place, held - sent, mask=live)
            if MASKED:
                clear_momentum(momentum + place, sent, live)
        left = left & (left - 1)

    unused = tile * SPAN + tl.arange(0, SPAN)
    behind = (unused >= tl.load(count)) & (unused < capacity)
    tl.store(indices + unused, tl.zeros([SPAN], tl.int32), mask=behind)
    tl.store(values + unused, tl.zeros([SPAN], tl.float32).to(values.dtype.element_ty), mask=behind)


def launch_mark(work: Tensor, scratch: Scratch, section: IndexSection | None) -> None:
    """Launch the kernel of `sparsifiers.gpu.mark`."""
    clear = scratch.edge[:0] if section is None else section.words
    each = power(-(-len(clear) // scratch.tiles)) if len(clear) else 0
    launch(
        mark_kernel, scratch.tiles, work,
        work, scratch.edge, scratch.above, scratch.ties, scratch.counts, clear, len(work), len(clear),
        SHIFT=DIGITS[0].shift, TILE=TILE, CLEARED=each,
    )  # fmt: skip


def launch_settle(work: Tensor, scratch: Scratch) -> None:
    """Launch the kernel of `sparsifiers.gpu.settle_ties`."""
    launch(
        settle_kernel, scratch.tiles, work,
        work, scratch.edge, scratch.above, scratch.ties, scratch.counts, TILE=TILE, num_warps=WALKERS,
    )  # fmt: skip


def launch_gather(
    work: Tensor,
    slots: Slots,
    scratch: Scratch,
    commit: bool,
    ties: bool,
    momentum: Tensor | None,
    section: IndexSection | None,
) -> None:
    """Launch the scan and the compaction of `sparsifiers.gpu.gather`."""
    capacity, tiles = len(slots.indices), scratch.tiles
    dtype = slots.values.dtype
    launch(
        scan_kernel, 1, work,
        scratch.counts, scratch.edge, slots.count, tiles, capacity, TIES=ties, SCANNED=SCANNED,
    )  # fmt: skip
    launch(
        gather_kernel, tiles, work,
        work, work if momentum is None else momentum, scratch.above, scratch.ties, scratch.counts, scratch.edge,
        slots.count, slots.indices, slots.values, capacity, scratch.edge if section is None else section.words,
        *((0,) * 5 if section is None else section.layout.planes),
        COMMIT=commit, MASKED=momentum is not None, TIES=ties,
        LIMIT=0.0 if dtype == torch.float32 else torch.finfo(dtype).max, TILE=TILE,
        SPAN=power(-(-capacity // tiles)), CODED=section is not None,
        LOW=0 if section is None else section.layout.low, num_warps=WALKERS,
    )  # fmt: skip
