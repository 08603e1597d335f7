# SPDX-License-Identifier: Apache-2.0
"""Histogram of digits of 11 bits, counted in windows of 256 bins.

Triton before 3.8 takes a ballot of a warp for each bin and element, so that 2048 bins at once would cost more than the
memory that is read. Digits of magnitudes lie in few windows: one has 32 octaves, and another one the zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

BALLOTS = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)  # a histogram's cost grows with its bins
REGISTERS = 128 if BALLOTS else None  # of a thread, for the assembler's option: for ballots it would take up to 205


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
def add_to(histogram: tl.tensor, counts: tl.tensor) -> None:
    """Add `counts`, int32[8, 256], to a histogram of 2048 bins that all programs share."""
    bins = tl.arange(0, 8)[:, None] * 256 + tl.arange(0, 256)[None, :]
    tl.atomic_add(histogram + bins, counts, mask=counts > 0, sem="relaxed")
