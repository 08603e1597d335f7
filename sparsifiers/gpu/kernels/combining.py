# SPDX-License-Identifier: Apache-2.0
"""Add up what all ranks have sent, by tiles of the update and without atomic operations (K4); merge their heads."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sparsifiers.gpu.kernels.launching import launch, power

SMALL, LARGE = 4096, 16384  # elements of a tile: large ones, where there are enough, wait less for memory
ENOUGH = 1 << 22  # elements
CHUNK = 256  # slots of a rank at once


@triton.jit
def first_at(
    indices: tl.tensor, stride: tl.tensor, rank: tl.tensor, count: tl.tensor, place: tl.tensor, STEPS: tl.constexpr
) -> tl.tensor:
    """Return each rank's first slot with an index not below `place`, by bisection of all ranks at once."""
    low = count * 0
    high = count
    for _ in range(STEPS):
        middle = (low + high) // 2
        open_ = low < high
        index = tl.load(indices + rank.to(tl.int64) * stride + middle, mask=open_, other=0)
        low = tl.where(open_ & (index < place), middle + 1, low)
        high = tl.where(open_ & (index >= place), middle, high)
    return low


@triton.jit
def add_kernel(
    update: tl.tensor, indices: tl.tensor, index_stride: tl.tensor, values: tl.tensor, value_stride: tl.tensor,
    counts: tl.tensor, count_stride: tl.tensor, length: tl.tensor, capacity: tl.tensor, ranks: tl.tensor,
    scale: tl.tensor,
    RANKS: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Write one tile of the update, which no other program touches."""
    start = tl.program_id(0) * TILE
    stop = tl.minimum(length - start, TILE) + start
    places = tl.arange(0, TILE)
    tl.store(update + start + places, tl.zeros([TILE], tl.float32), mask=places < stop - start)
    rank = tl.arange(0, RANKS)
    count = tl.load(counts + rank.to(tl.int64) * count_stride, mask=rank < ranks, other=0)
    count = tl.minimum(tl.maximum(count, 0), capacity)
    first = first_at(indices, index_stride, rank, count, start, STEPS)
    last = first_at(indices, index_stride, rank, count, stop, STEPS)
    for one in range(0, ranks):
        # Other threads read here the values that one has written before.
        tl.debug_barrier()
        end = tl.sum(tl.where(rank == one, last, 0), 0)
        for slot in range(tl.sum(tl.where(rank == one, first, 0), 0), end, CHUNK):
            slots = slot + tl.arange(0, CHUNK)
            index = tl.load(indices + slots, mask=slots < end, other=-1)
            value = tl.load(values + slots, mask=slots < end, other=0.0).to(tl.float32)
            inside = (index >= start) & (index < stop)
            before = tl.load(update + index, mask=inside, other=0.0)
            tl.store(update + index, before + value * scale, mask=inside)
        indices += index_stride
        values += value_stride


def launch_add(update: Tensor, indices: Tensor, values: Tensor, counts: Tensor, scale: float) -> None:
    """Launch the kernel of `sparsifiers.gpu.add_ranks`."""
    length, (ranks, capacity) = len(update), indices.shape
    tile = SMALL if length < ENOUGH else LARGE
    launch(
        add_kernel, -(-length // tile), update,
        update, indices, indices.stride(0), values, values.stride(0), counts, counts.stride(0),
        length, capacity, ranks, float(scale),
        RANKS=power(ranks), STEPS=capacity.bit_length(), TILE=tile, CHUNK=CHUNK,
    )  # fmt: skip


BLOCK = 1024  # elements of a program


@triton.jit
def whole_kernel(
    update: tl.tensor, rows: tl.tensor, stride: tl.tensor, length: tl.tensor, ranks: tl.tensor, scale: tl.tensor,
    factor: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write one block of the update."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    within = place < length
    total = tl.load(rows + place, mask=within, other=0.0).to(tl.float32) * scale
    for _ in range(1, ranks):
        rows += stride
        total += tl.load(rows + place, mask=within, other=0.0).to(tl.float32) * scale
    tl.store(update + place, total * factor, mask=within)


def launch_whole(update: Tensor, rows: Tensor, scale: float, factor: float) -> None:
    """Launch the kernel of `sparsifiers.gpu.add_whole`."""
    programs = -(-len(update) // BLOCK)
    launch(
        whole_kernel, programs, update,
        update, rows, rows.stride(0), len(update), len(rows), scale, factor, BLOCK=BLOCK,
    )  # fmt: skip


@triton.jit
def merged_word(words: tl.tensor, stride: tl.tensor, ranks: tl.tensor, place: tl.tensor, there: tl.tensor) -> tl.tensor:
    """Return the words of all ranks at these places, OR-ed."""
    merged = tl.load(words + place, mask=there, other=0)
    for _ in range(1, ranks):
        words += stride
        merged = merged | tl.load(words + place, mask=there, other=0)
    return merged


@triton.jit(do_not_specialize=["length", "own", "ranks", "free", "used", "low", "high"])
def heads_kernel(
    words: tl.tensor, stride: tl.tensor, figures: tl.tensor, figure_stride: tl.tensor, out: tl.tensor, said: tl.tensor,
    length: tl.tensor, own: tl.tensor, ranks: tl.tensor, free: tl.tensor, used: tl.tensor, low: tl.tensor,
    high: tl.tensor,
    WORDS: tl.constexpr,
) -> None:  # fmt: skip
    """Write the merged words, and the figures. `low` and `high`: the halves of the key."""
    place = tl.arange(0, WORDS)
    there = place < length
    tl.store(out + place, merged_word(words, stride, ranks, place, there), mask=there)
    compared = there & (place != free) & (place < used)
    mine = tl.load(words + own.to(tl.int64) * stride + place, mask=compared, other=0)
    fault = ranks * 0
    squares = tl.load(figures + 2).to(tl.float64, bitcast=True)
    for rank in range(0, ranks):
        theirs = tl.load(words + place, mask=compared, other=0)
        differs = tl.max((theirs != mine).to(tl.int32), 0)
        fault = tl.where(differs > 0, rank + 1, fault)
        if rank > 0:
            figures += figure_stride
            squares += tl.load(figures + 2).to(tl.float64, bitcast=True)
        words += stride
    tl.store(said, fault.to(tl.int64))
    tl.store(said + 1, (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF))
    tl.store(said + 2, squares.to(tl.int64, bitcast=True))
    tl.store(said + 3, ranks.to(tl.int64) * 0)


def launch_heads(
    words: Tensor, figures: Tensor, own: int, key: int, out: tuple[Tensor, Tensor], free: int, used: int
) -> None:
    """Launch the kernel of `sparsifiers.gpu.merge_heads`."""
    low = key & 0xFFFFFFFF
    launch(
        heads_kernel, 1, words,
        words, words.stride(0), figures, figures.stride(0), *out, words.shape[1], own, len(words), free, used,
        low - (low >> 31 << 32), key >> 32, WORDS=power(words.shape[1]),
    )  # fmt: skip
