# SPDX-License-Identifier: Apache-2.0
"""Count digits of keys, and find the k-th largest key's digit in their histogram (K2)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sparsifiers.gpu.kernels.launching import launch, persistent
from sparsifiers.gpu.scratch import DIGITS, TILE, Scratch

# Words of bitmaps, int32: how many bits are set, and walks from the lowest to the highest of these.
#
# A walk of a tensor of words takes as many turns as the fullest word has bits; in each a lane has one of its own:
#
#     for _ in range(turns(left)):
#         bit = lowest(left)          # the word that has this bit alone; 0 of a word that is through
#         ... ones_in(bit - 1) ...    # its number, 0 to 31
#         left = left & (left - 1)


@triton.jit
def ones_in(words: tl.tensor) -> tl.tensor:
    """Return how many bits of each word are set."""
    bits = words.to(tl.uint32, bitcast=True)
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    bits = bits + (bits >> 8)
    return ((bits + (bits >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def lowest(words: tl.tensor) -> tl.tensor:
    """Return each word's lowest bit alone; 0 of 0."""
    return words & (0 - words)


@triton.jit
def turns(words: tl.tensor) -> tl.tensor:
    """Return how many turns a walk takes: the most bits of a word."""
    return tl.max(ones_in(words), 0)


# Histogram of digits of 11 bits, counted in windows of 256 bins.
#
# Triton before 3.8 takes a ballot of a warp for each bin and element, so that 2048 bins at once would cost more than
# the memory that is read. First digits of magnitudes lie in one window, the usual one, of 32 octaves around where the
# last selection found its edge, or are those of zeros; later digits lie in all eight.

BALLOTS = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)  # a histogram's cost grows with its bins
REGISTERS = 128 if BALLOTS else None  # of a thread, for the assembler's option: for ballots it would take up to 205
FIRST = tl.constexpr(784)  # the first digit of the usual window where no edge is known, that of 2**-29
BELOW = tl.constexpr(256 - 48)  # first digits of the usual window below the edge: 26 octaves, and 6 above it
USUAL = tl.constexpr(8)  # number of the usual window, behind those of eight times 256 digits
ODD = tl.constexpr(64)  # digits of a block that are in no usual place: so many are counted one by one


@triton.jit
def no_counts() -> tl.tensor:
    """Return the counts of nothing: int32[8, 256], by window and place in it."""
    return tl.zeros([8, 256], tl.int32)


@triton.jit
def count(counts: tl.tensor, digits: tl.tensor, live: tl.tensor) -> tl.tensor:
    """Return `counts`, int32[8, 256], and how often each digit occurs among those that are `live`."""
    digits = tl.where(live, digits, -1)  # which is in no window
    window = digits >> 8
    lowest = tl.min(tl.where(live, window, 7), 0)
    for one in range(lowest, tl.max(window, 0) + 1):
        inside = window == one
        if tl.max(inside.to(tl.int32), 0) > 0:
            found = tl.histogram(digits & 255, 256, mask=inside)
            counts += tl.where(tl.arange(0, 8)[:, None] == one, found[None, :], 0)
    return counts


@triton.jit
def usual_window(edge: tl.tensor) -> tl.tensor:
    """Return the first digit of the usual window: 1 to 1792."""
    digit = tl.load(edge + 2)
    return tl.where(digit > 0, tl.minimum(tl.maximum(digit - BELOW, 1), 2048 - 256), FIRST)


@triton.jit
def no_first_digits() -> tuple[tl.tensor, tl.tensor]:
    """Return the counts of nothing for :func:`count_first_digits`."""
    return tl.zeros([256], tl.int32), 0


@triton.jit
def count_first_digits(
    counts: tl.tensor, zeros: tl.tensor, usual: tl.tensor, histogram: tl.tensor, digits: tl.tensor, left: tl.tensor,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Count the `left` first ones of `BLOCK` first digits; return new `counts` and `zeros`.

    counts: int32[256], of the usual window, which begins with `usual`. zeros: how many digits are 0, and how many are
    in `counts`. Digits that are neither are added to `histogram` at once.
    """
    live = tl.arange(0, BLOCK) < left
    is_usual = (digits >= usual) & (digits < usual + 256) & live
    is_odd = (digits > 0) & (is_usual == 0) & live
    odd = tl.sum(is_odd.to(tl.int32), 0)
    zeros += tl.minimum(tl.maximum(left, 0), BLOCK) - odd
    first = USUAL
    last = 0
    if odd > ODD:
        first = tl.min(tl.where(is_odd, digits >> 8, USUAL), 0)
        last = tl.max(tl.where(is_odd, digits >> 8, 0), 0)
    elif odd > 0:
        tl.atomic_add(histogram + digits, tl.full([BLOCK], 1, tl.int32), mask=is_odd, sem="relaxed")
    for window in range(first, USUAL + 1):
        if (window <= last) | (window == USUAL):
            inside = tl.where(window == USUAL, is_usual, is_odd & ((digits >> 8) == window))
            place = tl.where(window == USUAL, digits - usual, digits) & 255
            found = tl.histogram(place, 256, mask=inside)
            counts += tl.where(window == USUAL, found, 0)
            bins = histogram + window * 256 + tl.arange(0, 256)
            tl.atomic_add(bins, found, mask=(found > 0) & (window < USUAL), sem="relaxed")
    return counts, zeros


@triton.jit
def add_first_digits(histogram: tl.tensor, counts: tl.tensor, zeros: tl.tensor, usual: tl.tensor) -> None:
    """Add what :func:`count_first_digits` has counted to a histogram of 2048 bins that all programs share."""
    tl.atomic_add(histogram + usual + tl.arange(0, 256), counts, mask=counts > 0, sem="relaxed")
    tl.atomic_add(histogram, zeros - tl.sum(counts, 0), sem="relaxed")


@triton.jit
def add_to(histogram: tl.tensor, counts: tl.tensor) -> None:
    """Add `counts`, int32[8, 256], to a histogram of 2048 bins that all programs share."""
    bins = tl.arange(0, 8)[:, None] * 256 + tl.arange(0, 256)[None, :]
    tl.atomic_add(histogram + bins, counts, mask=counts > 0, sem="relaxed")


# The edge.

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


def launch_count_digits(work: Tensor, scratch: Scratch) -> None:
    """Launch the kernel of `sparsifiers.gpu.count_digits`."""
    programs = persistent(scratch.tiles, work)
    launch(
        count_digits_kernel, programs, work,
        work, scratch.edge, scratch.histogram, len(work), scratch.tiles, -(-scratch.tiles // programs),
        SHIFT=DIGITS[0].shift, TILE=TILE, PART=PART, maxnreg=REGISTERS,
    )  # fmt: skip


def launch_count_ties(work: Tensor, level: int, scratch: Scratch) -> None:
    """Launch the kernel of `sparsifiers.gpu.count_ties`."""
    programs = persistent(scratch.tiles, work)
    launch(
        count_ties_kernel, programs, work,
        work, scratch.ties, scratch.counts, scratch.edge, scratch.histogram, scratch.tiles,
        -(-scratch.tiles // programs),
        SHIFT=DIGITS[level].shift, BITS=DIGITS[level].bits, TILE=TILE, PART=MARKED, FEW=FEW,
    )  # fmt: skip


def launch_find_edge(k: int, level: int, scratch: Scratch) -> None:
    """Launch the kernel of `sparsifiers.gpu.find_edge`."""
    launch(
        edge_kernel, 1, scratch.edge,
        scratch.histogram, scratch.edge, k, FIRST=level == 0, BITS=DIGITS[level].bits,
    )  # fmt: skip
