# SPDX-License-Identifier: Apache-2.0
"""Add the values of all ranks by tiles of the update, without atomic operations (K4)."""

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


def run(update: Tensor, indices: Tensor, values: Tensor, counts: Tensor, scale: float) -> None:
    """Launch the kernel of `sparsifiers.gpu.add_ranks`."""
    length, (ranks, capacity) = len(update), indices.shape
    tile = SMALL if length < ENOUGH else LARGE
    launch(
        add_kernel, -(-length // tile), update,
        update, indices, indices.stride(0), values, values.stride(0), counts, counts.stride(0),
        length, capacity, ranks, float(scale),
        RANKS=power(ranks), STEPS=capacity.bit_length(), TILE=tile, CHUNK=CHUNK,
    )  # fmt: skip
