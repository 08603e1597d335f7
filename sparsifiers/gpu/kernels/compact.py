"""Mark what is taken in bitmaps, scan their counts, and compact from the bitmaps (K3, without spinning)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsifiers.gpu.digits import DIGITS
from sparsifiers.gpu.kernels.edge import keys_of
from sparsifiers.gpu.kernels.launching import launch, power
from sparsifiers.gpu.scratch import TILE, Scratch
from sparsifiers.gpu.slots import Slots

SCANNED = 2048  # tiles at once
PART = 1024  # elements of a tile that a program compacts at once: all of them would take too many registers


@triton.jit
def mark_kernel(
    work: tl.tensor, edge: tl.tensor, above: tl.tensor, ties: tl.tensor, counts: tl.tensor, length: tl.tensor,
    SHIFT: tl.constexpr, LEAST: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Mark one tile."""
    tile = tl.program_id(0)
    words = tl.arange(0, TILE // 32)
    lanes = tl.arange(0, 32)[None, :]
    places = words[:, None] * 32 + lanes
    left = length - tile * TILE
    keys = keys_of(work + tile * TILE, places, left, TILE)
    prefix = tl.load(edge)
    is_above = (keys >> SHIFT) > prefix  # never so behind the end, where keys are 0
    is_tie = ((keys >> SHIFT) == prefix) & (keys >= LEAST) & (places < left)
    tl.store(above + tile * (TILE // 32) + words, tl.sum(is_above.to(tl.int32) << lanes, 1))
    tl.store(ties + tile * (TILE // 32) + words, tl.sum(is_tie.to(tl.int32) << lanes, 1))
    tl.store(counts + 2 * tile, tl.sum(tl.sum(is_above.to(tl.int32), 1), 0))
    tl.store(counts + 2 * tile + 1, tl.sum(tl.sum(is_tie.to(tl.int32), 1), 0))


@triton.jit
def scan_kernel(
    counts: tl.tensor, edge: tl.tensor, count: tl.tensor, tiles: tl.tensor, capacity: tl.tensor,
    TIES: tl.constexpr, SCANNED: tl.constexpr,
) -> None:  # fmt: skip
    """Turn the counts of tiles into counts of what lies before each; a single program does it, chunk by chunk."""
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
def take_off(work: tl.tensor, momentum: tl.tensor, sent: tl.tensor, live: tl.tensor, MASKED: tl.constexpr) -> None:
    """Subtract fp32 numbers at the places that the pointers `work` say, and clear the momentum where they are not 0."""
    tl.store(work, tl.load(work, mask=live, other=0.0) - sent, mask=live)
    if MASKED:
        kept = tl.load(momentum, mask=live, other=0.0) * tl.where(sent == 0.0, 1.0, 0.0)
        tl.store(momentum, kept, mask=live)


@triton.jit
def gather_kernel(
    work: tl.tensor, momentum: tl.tensor, above: tl.tensor, ties: tl.tensor, counts: tl.tensor, edge: tl.tensor,
    count: tl.tensor, indices: tl.tensor, values: tl.tensor, clear: tl.tensor, capacity: tl.tensor, words: tl.tensor,
    COMMIT: tl.constexpr, MASKED: tl.constexpr, TIES: tl.constexpr, LIMIT: tl.constexpr, TILE: tl.constexpr,
    PART: tl.constexpr, SPAN: tl.constexpr, CLEARED: tl.constexpr,
) -> None:  # fmt: skip
    """Write the slots of one tile, `SPAN` slots of those that are not in use, and `CLEARED` words."""
    tile = tl.program_id(0)
    room = tl.load(edge + 1) if TIES else 0
    before = tl.load(counts + 2 * tile)
    ties_before = tl.load(counts + 2 * tile + 1)
    for part in tl.static_range(0, TILE, PART):
        places = tile * TILE + part + tl.arange(0, PART)
        is_above = (tl.load(above + places // 32) >> (places % 32)) & 1
        if TIES:
            # One scan of both: a part has fewer than 2**15 elements, so neither half runs over.
            is_tie = (tl.load(ties + places // 32) >> (places % 32)) & 1
            both = is_above + (is_tie << 16)
            earlier = tl.cumsum(both, 0) - both
            tie_rank = ties_before + (earlier >> 16)
            live = (is_above | ((tie_rank < room) & (is_tie != 0))) != 0
            slot = before + (earlier & 0xFFFF) + tl.minimum(tie_rank, room)
            ties_before += tl.sum(is_tie, 0)
        else:
            live = is_above != 0
            slot = before + tl.cumsum(is_above, 0) - is_above
        before += tl.sum(is_above, 0)
        live = live & (slot < capacity)
        value = tl.load(work + places, mask=live, other=0.0)
        if LIMIT > 0:
            inside = tl.where(value > LIMIT, LIMIT, tl.where(value < -LIMIT, -LIMIT, value))
            value = inside + value * 0.0  # NaN for what is not finite
        rounded = value.to(values.dtype.element_ty)
        tl.store(indices + slot, places, mask=live)
        tl.store(values + slot, rounded, mask=live)
        if COMMIT:
            take_off(work + places, momentum + places, rounded.to(tl.float32), live, MASKED)

    unused = tile * SPAN + tl.arange(0, SPAN)
    behind = (unused >= tl.load(count)) & (unused < capacity)
    tl.store(indices + unused, tl.zeros([SPAN], tl.int32), mask=behind)
    tl.store(values + unused, tl.zeros([SPAN], tl.float32).to(values.dtype.element_ty), mask=behind)
    if CLEARED > 0:
        word = tile * CLEARED + tl.arange(0, CLEARED)
        tl.store(clear + word, tl.zeros([CLEARED], tl.int32), mask=word < words)


@triton.jit
def commit_kernel(
    work: tl.tensor, momentum: tl.tensor, indices: tl.tensor, sent: tl.tensor, count: tl.tensor, capacity: tl.tensor,
    MASKED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Take off what `BLOCK` slots have sent: their indices are unique."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = slot < tl.minimum(tl.load(count), capacity)
    index = tl.load(indices + slot, mask=live, other=0)
    off = tl.load(sent + slot, mask=live, other=0.0).to(tl.float32)
    take_off(work + index, momentum + index, off, live, MASKED)


def run_mark(work: Tensor, level: int, least: int, scratch: Scratch) -> None:
    """Launch it: see `sparsifiers.gpu.mark`."""
    launch(
        mark_kernel, scratch.tiles, work,
        work, scratch.edge, scratch.above, scratch.ties, scratch.counts, len(work),
        SHIFT=DIGITS[level].shift, LEAST=least, TILE=TILE,
    )  # fmt: skip


def run_gather(
    work: Tensor,
    slots: Slots,
    scratch: Scratch,
    commit: bool,
    ties: bool,
    momentum: Tensor | None,
    clear: Tensor | None,
) -> None:
    """Launch the scan and the compaction: see `sparsifiers.gpu.gather`."""
    capacity, tiles = len(slots.indices), scratch.tiles
    words = 0 if clear is None else len(clear)
    dtype = slots.values.dtype
    launch(
        scan_kernel, 1, work,
        scratch.counts, scratch.edge, slots.count, tiles, capacity, TIES=ties, SCANNED=SCANNED,
    )  # fmt: skip
    launch(
        gather_kernel, tiles, work,
        work, work if momentum is None else momentum, scratch.above, scratch.ties, scratch.counts, scratch.edge,
        slots.count, slots.indices, slots.values, scratch.edge if clear is None else clear, capacity, words,
        COMMIT=commit, MASKED=momentum is not None, TIES=ties,
        LIMIT=0.0 if dtype == torch.float32 else torch.finfo(dtype).max, TILE=TILE, PART=PART,
        SPAN=power(-(-capacity // tiles)), CLEARED=power(-(-words // tiles)) if words else 0,
    )  # fmt: skip


def run_commit(work: Tensor, slots: Slots, sent: Tensor, momentum: Tensor | None) -> None:
    """Launch it: see `sparsifiers.gpu.commit`."""
    capacity, block = len(slots.indices), 1024
    launch(
        commit_kernel, -(-capacity // block), work,
        work, work if momentum is None else momentum, slots.indices, sent, slots.count, capacity,
        MASKED=momentum is not None, BLOCK=block,
    )  # fmt: skip
