# SPDX-License-Identifier: Apache-2.0
"""Histogram of digits of 11 bits, counted in windows of 256 bins.

Triton before 3.8 takes a ballot of a warp for each bin and element, so that 2048 bins at once would cost more than the
memory that is read. First digits of magnitudes lie in one window, the usual one, of 32 octaves around where the last
selection found its edge, or are those of zeros; later digits lie in all eight.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
