# SPDX-License-Identifier: Apache-2.0
"""Count digits of keys, and find the k-th largest key's digit in their histogram (K2)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sparsifiers.gpu.digits import DIGITS
from sparsifiers.gpu.kernels.histogram import (
    REGISTERS,
    add_first_digits,
    add_to,
    count,
    count_first_digits,
    no_counts,
    no_first_digits,
    usual_window,
)
from sparsifiers.gpu.kernels.launching import launch, persistent
from sparsifiers.gpu.kernels.words import lowest, ones_in, turns
from sparsifiers.gpu.scratch import TILE, Scratch

PART = 2048  # elements of a tile at once: eight a thread
MARKED = 1024  # where a bitmap says which are looked at, which takes registers
FEW = 256  # of a tile: so few are counted one by one, and all of them may have one bin


@triton.jit
def keys_of(work: tl.tensor, places: tl.tensor, left: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """Return the keys of the fp32 numbers at `places`, and 0 for those at and behind `left`."""
    if left >= TILE:  # without a mask, so that loads are 16 bytes wide
        bits = tl.load(work + places).to(tl.int32, bitcast=True)
    else:
        bits = tl.load(work + places, mask=places < left, other=0.0).to(tl.int32, bitcast=True)
    return bits & 0x7FFFFFFF


@triton.jit
def count_digits_kernel(
    work: tl.tensor, edge: tl.tensor, histogram: tl.tensor, length: tl.tensor, tiles: tl.tensor, share: tl.tensor,
    SHIFT: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr,
) -> None:  # fmt: skip
    """Count the first digits in the tiles `share * program` and so on, and add up one histogram of all of them."""
    usual = usual_window(edge)
    counts, zeros = no_first_digits()
    places = tl.arange(0, PART)
    first = tl.program_id(0) * share
    for tile in range(first, tl.minimum(first + share, tiles)):
        for part in range(0, TILE, PART):
            left = length - tile * TILE - part
            keys = keys_of(work + tile * TILE + part, places, left, PART)
            counts, zeros = count_first_digits(counts, zeros, usual, histogram, keys >> SHIFT, left, PART)
    add_first_digits(histogram, counts, zeros, usual)


@triton.jit
def count_ties_kernel(
    work: tl.tensor, ties: tl.tensor, tie_counts: tl.tensor, edge: tl.tensor, histogram: tl.tensor, tiles: tl.tensor,
    share: tl.tensor,
    SHIFT: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr, FEW: tl.constexpr,
) -> None:  # fmt: skip
    """Count a later digit of marked elements in the tiles `share * program` and so on."""
    counts = no_counts()
    prefix = tl.load(edge)
    first = tl.program_id(0) * share
    for tile in range(first, tl.minimum(first + share, tiles)):
        marked = tl.load(tie_counts + 2 * tile + 1)
        if marked > FEW:
            for part in range(0, TILE, PART):
                places = tile * TILE + part + tl.arange(0, PART)
                is_tie = ((tl.load(ties + places // 32) >> (places % 32)) & 1) != 0
                keys = tl.load(work + places, mask=is_tie, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
                counted = is_tie & ((keys >> (SHIFT + BITS)) == prefix)
                counts = count(counts, (keys >> SHIFT) & ((1 << BITS) - 1), counted)
        elif marked > 0:  # digits of a mantissa lie in all windows
            at = tile * (TILE // 32) + tl.arange(0, TILE // 32)
            left = tl.load(ties + at)
            for _ in range(turns(left)):
                place = at * 32 + ones_in(lowest(left) - 1)
                key = tl.load(work + place, mask=left != 0, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
                counted = (left != 0) & ((key >> (SHIFT + BITS)) == prefix)
                digits = (key >> SHIFT) & ((1 << BITS) - 1)
                tl.atomic_add(histogram + digits, tl.full([TILE // 32], 1, tl.int32), mask=counted, sem="relaxed")
                left = left & (left - 1)
    add_to(histogram, counts)


@triton.jit(do_not_specialize=["k"])
def edge_kernel(histogram: tl.tensor, edge: tl.tensor, k: tl.tensor, FIRST: tl.constexpr, BITS: tl.constexpr) -> None:
    """Append a digit to the edge; a single program does it."""
    bins = tl.arange(0, 2048)
    counts = tl.load(histogram + bins)
    prefix = 0 if FIRST else tl.load(edge)
    room = k if FIRST else tl.load(edge + 1)
    from_top = tl.cumsum(counts, 0, reverse=True)
    digit = tl.maximum(tl.sum((from_top >= room).to(tl.int32), 0) - 1, 0)
    larger = tl.sum(tl.where(bins > digit, counts, 0), 0)
    tl.store(edge, (prefix << BITS) | digit)
    tl.store(edge + 1, room - larger)
    if FIRST:
        tl.store(edge + 2, digit)
    tl.store(histogram + bins, tl.zeros([2048], tl.int32))


def run_count(work: Tensor, scratch: Scratch) -> None:
    """Launch the kernel of `sparsifiers.gpu.count_digits`."""
    programs = persistent(scratch.tiles, work)
    launch(
        count_digits_kernel, programs, work,
        work, scratch.edge, scratch.histogram, len(work), scratch.tiles, -(-scratch.tiles // programs),
        SHIFT=DIGITS[0].shift, TILE=TILE, PART=PART, maxnreg=REGISTERS,
    )  # fmt: skip


def run_ties(work: Tensor, level: int, scratch: Scratch) -> None:
    """Launch the kernel of `sparsifiers.gpu.count_ties`."""
    programs = persistent(scratch.tiles, work)
    launch(
        count_ties_kernel, programs, work,
        work, scratch.ties, scratch.counts, scratch.edge, scratch.histogram, scratch.tiles,
        -(-scratch.tiles // programs),
        SHIFT=DIGITS[level].shift, BITS=DIGITS[level].bits, TILE=TILE, PART=MARKED, FEW=FEW,
    )  # fmt: skip


def run_edge(k: int, level: int, scratch: Scratch) -> None:
    """Launch the kernel of `sparsifiers.gpu.find_edge`."""
    launch(
        edge_kernel, 1, scratch.edge,
        scratch.histogram, scratch.edge, k, FIRST=level == 0, BITS=DIGITS[level].bits,
    )  # fmt: skip
