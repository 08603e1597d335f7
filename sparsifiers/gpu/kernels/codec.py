# SPDX-License-Identifier: Apache-2.0
"""Write and read indices in few bits."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sparsifiers.gpu.kernels.launching import launch
from sparsifiers.gpu.layout import PLAIN, TILE_BITS, IndexLayout, IndexSection

BLOCK = 1024  # slots that a program writes
SUMMED = 1024  # counts of tiles at once


@triton.jit
def set_field(
    words: tl.tensor, start: tl.tensor, slot: tl.tensor, index: tl.tensor, live: tl.tensor,
    LOW: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Write `WIDTH` of the low bits of an index; wider planes have the bits below these."""
    field = (index >> (LOW & (32 - 2 * WIDTH))) & ((1 << WIDTH) - 1)
    bit = start + slot.to(tl.int64) * WIDTH
    tl.atomic_or(words + (bit >> 5), field << (bit & 31).to(tl.int32), mask=live, sem="relaxed")


@triton.jit
def set_index(
    words: tl.tensor, at16: tl.tensor, at8: tl.tensor, at4: tl.tensor, at2: tl.tensor, unary: tl.tensor,
    slot: tl.tensor, index: tl.tensor, live: tl.tensor, LOW: tl.constexpr,
) -> None:  # fmt: skip
    """Write the indices of some slots into words that were 0."""
    if LOW < 0:
        tl.store(words + slot, index, mask=live)
    else:
        bit = index.to(tl.int64) + unary
        if LOW > 0:
            bit = ((index >> LOW) + slot).to(tl.int64) + unary
        tl.atomic_or(words + (bit >> 5), (live.to(tl.int32)) << (bit & 31).to(tl.int32), mask=live, sem="relaxed")
        if LOW & 16:
            set_field(words, at16, slot, index, live, LOW, 16)
        if LOW & 8:
            set_field(words, at8, slot, index, live, LOW, 8)
        if LOW & 4:
            set_field(words, at4, slot, index, live, LOW, 4)
        if LOW & 2:
            set_field(words, at2, slot, index, live, LOW, 2)


@triton.jit
def encode_kernel(
    indices: tl.tensor, count: tl.tensor, words: tl.tensor,
    at16: tl.tensor, at8: tl.tensor, at4: tl.tensor, at2: tl.tensor, unary: tl.tensor, capacity: tl.tensor,
    LOW: tl.constexpr, COUNTED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write `BLOCK` slots. `COUNTED`: how many are in use lies on the device; else it is the number itself."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    used = tl.load(count) if COUNTED else count
    live = slot < tl.minimum(used, capacity)
    index = tl.load(indices + slot, mask=live, other=0)
    set_index(words, at16, at8, at4, at2, unary, slot, index, live, LOW)


@triton.jit
def marks_of(words: tl.tensor, unary: tl.tensor, bit: tl.tensor, live: tl.tensor) -> tl.tensor:
    """Return the bits of the unary part, 0 where not `live`."""
    at = bit.to(tl.int64) + unary
    word = tl.load(words + (at >> 5), mask=live, other=0)
    return (word >> (at & 31).to(tl.int32)) & 1


@triton.jit
def field_of(
    words: tl.tensor, start: tl.tensor, slot: tl.tensor, live: tl.tensor, LOW: tl.constexpr, WIDTH: tl.constexpr
) -> tl.tensor:
    """Return `WIDTH` of the low bits of slots, in their place."""
    bit = start + slot.to(tl.int64) * WIDTH
    word = tl.load(words + (bit >> 5), mask=live, other=0)
    field = (word >> (bit & 31).to(tl.int32)) & ((1 << WIDTH) - 1)
    return field << (LOW & (32 - 2 * WIDTH))


@triton.jit
def low_bits(
    words: tl.tensor, at16: tl.tensor, at8: tl.tensor, at4: tl.tensor, at2: tl.tensor,
    slot: tl.tensor, live: tl.tensor, LOW: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the `LOW` bits of slots within their blocks."""
    bits = slot * 0
    if LOW & 16:
        bits |= field_of(words, at16, slot, live, LOW, 16)
    if LOW & 8:
        bits |= field_of(words, at8, slot, live, LOW, 8)
    if LOW & 4:
        bits |= field_of(words, at4, slot, live, LOW, 4)
    if LOW & 2:
        bits |= field_of(words, at2, slot, live, LOW, 2)
    return bits


@triton.jit
def count_marks_kernel(
    words: tl.tensor, stride: tl.tensor, unary: tl.tensor, marks: tl.tensor, tiles: tl.tensor, good: tl.tensor,
    TILE_BITS: tl.constexpr,
) -> None:  # fmt: skip
    """Count the marks of one tile of one rank."""
    rank = tl.program_id(1)
    tile = tl.program_id(0)
    bit = tile * TILE_BITS + tl.arange(0, TILE_BITS)
    ones = marks_of(words + rank.to(tl.int64) * stride, unary, bit, bit < marks)
    tl.store(tiles + rank * tl.num_programs(0) + tile, tl.sum(ones, 0))
    if tile == 0:
        tl.store(good + rank, 1)


@triton.jit
def decode_kernel(
    words: tl.tensor, stride: tl.tensor, counts: tl.tensor, count_stride: tl.tensor, tiles: tl.tensor,
    indices: tl.tensor, good: tl.tensor,
    at16: tl.tensor, at8: tl.tensor, at4: tl.tensor, at2: tl.tensor, unary: tl.tensor, marks: tl.tensor,
    length: tl.tensor, capacity: tl.tensor,
    LOW: tl.constexpr, TILE_BITS: tl.constexpr, SUMMED: tl.constexpr,
) -> None:  # fmt: skip
    """Write the indices that have their marks in one tile of one rank."""
    rank = tl.program_id(1)
    tile = tl.program_id(0)
    count = tl.load(counts + rank.to(tl.int64) * count_stride)
    words += rank.to(tl.int64) * stride
    tiles += rank * tl.num_programs(0)
    before = 0
    for first in range(0, tile, SUMMED):
        other = first + tl.arange(0, SUMMED)
        before += tl.sum(tl.load(tiles + other, mask=other < tile, other=0), 0)

    bit = tile * TILE_BITS + tl.arange(0, TILE_BITS)
    ones = marks_of(words, unary, bit, bit < marks)
    slot = before + tl.cumsum(ones, 0) - ones
    live = (ones != 0) & (slot < capacity)
    index = bit
    unsorted = live & False
    if LOW > 0:
        low = low_bits(words, at16, at8, at4, at2, slot, live, LOW)
        # Beyond the vector, and before the shift could lose bits: any index that is.
        block = bit - slot
        index = tl.where(block <= (length - 1) >> LOW, (block << LOW) | low, 0x7FFFFFFF)
        # Two marks side by side are of one block: there the low bits alone say whether indices ascend.
        beside = live & (bit > 0) & (marks_of(words, unary, bit - 1, live & (bit > 0)) != 0)
        unsorted = beside & (low_bits(words, at16, at8, at4, at2, slot - 1, beside, LOW) >= low)
    tl.store(indices + rank.to(tl.int64) * capacity + slot, index, mask=live)
    broken = tl.max((unsorted | (live & (index >= length))).to(tl.int32), 0)
    if tile == tl.num_programs(0) - 1:
        total = before + tl.sum(ones, 0)
        broken |= ((total != count) | (count > capacity)).to(tl.int32)
    if broken != 0:
        tl.atomic_and(good + rank, 0, sem="relaxed")


@triton.jit
def read_plain_kernel(
    words: tl.tensor, stride: tl.tensor, counts: tl.tensor, count_stride: tl.tensor, indices: tl.tensor,
    good: tl.tensor, length: tl.tensor, capacity: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Copy the plain indices of one rank, which are few, and look whether they ascend."""
    rank = tl.program_id(0)
    count = tl.load(counts + rank.to(tl.int64) * count_stride)
    words += rank.to(tl.int64) * stride
    indices += rank.to(tl.int64) * capacity
    broken = ((count > capacity) | (count < 0)).to(tl.int32)
    for first in range(0, tl.minimum(count, capacity), BLOCK):
        slot = first + tl.arange(0, BLOCK)
        live = slot < tl.minimum(count, capacity)
        index = tl.load(words + slot, mask=live, other=0)
        before = tl.load(words + slot - 1, mask=live & (slot > 0), other=-1)
        tl.store(indices + slot, index, mask=live)
        broken |= tl.max((live & ((index <= before) | (index >= length) | (index < 0))).to(tl.int32), 0)
    tl.store(good + rank, 1 - broken)


def launch_encode(indices: Tensor, count: int | Tensor, section: IndexSection) -> None:
    """Launch the kernel of `sparsifiers.gpu.encode_indices`."""
    layout, words = section.layout, section.words
    launch(
        encode_kernel, -(-layout.capacity // BLOCK), words,
        indices, count, words, *layout.planes, layout.capacity, LOW=layout.low,
        COUNTED=isinstance(count, Tensor), BLOCK=BLOCK,
    )  # fmt: skip


def launch_decode(words: Tensor, counts: Tensor, layout: IndexLayout, out: Tensor, good: Tensor, tiles: Tensor) -> None:
    """Launch the kernels of `sparsifiers.gpu.decode_indices`."""
    if layout.low == PLAIN:
        launch(
            read_plain_kernel, len(words), words,
            words, words.stride(0), counts, counts.stride(0), out, good, layout.length, layout.capacity, BLOCK=BLOCK,
        )  # fmt: skip
        return
    programs = (layout.tiles, len(words))
    launch(
        count_marks_kernel, programs, words,
        words, words.stride(0), layout.planes[-1], layout.marks, tiles, good, TILE_BITS=TILE_BITS,
    )  # fmt: skip
    launch(
        decode_kernel, programs, words,
        words, words.stride(0), counts, counts.stride(0), tiles, out, good, *layout.planes, layout.marks,
        layout.length, layout.capacity, LOW=layout.low, TILE_BITS=TILE_BITS, SUMMED=SUMMED,
    )  # fmt: skip
