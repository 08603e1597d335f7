# SPDX-License-Identifier: Apache-2.0
"""Guess the k-th largest magnitude from a small sample, low on purpose.

The guess only has to be cheap and seldom too high: its callers count the elements above it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsifiers import kernel

SAMPLES = 5.0  # times cbrt(k * n); for a key carried in vain that costs five times a sample (measured)
COMPILED_SAMPLES = 0.8  # the same where the loops of `kernel` carry it for a tenth of a sample
COMPILED_LEAST = 1 << 12  # samples even so: fewer save nothing, and may let so many through that they must be cut twice


def sampled_floor(bits: NDArray[np.signedinteger[Any]], mask: int, k: int) -> int:
    """Return a key that, but for one call in ten thousand, at least k of the keys `bits & mask` exceed.

    bits: signed integers [n], n >= 8; mask: see `magnitude_mask`. -1, which all keys exceed, if the sample is too
    small to tell.

    One element is read at a random place in
    each of m equal stretches: the stretches keep the sample's spread below that of independent draws, the
    random places keep a period in the data from matching the stride. The sample holds about p = m * k / n of
    the k largest, with standard deviation below sqrt(p); taking the (p + 4 sqrt(p) + 1)-th largest leaves
    four of them as a margin.

    m balances the two costs, reading samples against carrying about 4 n sqrt(p) / m keys too many: their sum
    is least where m grows as the cube root of k * n.
    """
    n = len(bits)
    compiled = kernel.reads(bits)
    samples, least = (COMPILED_SAMPLES, COMPILED_LEAST) if compiled else (SAMPLES, 1)
    m = min(n // 8, max(least, math.ceil(samples * (k * n) ** (1 / 3))))
    expected = m * k / n
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 1)
    if rank > m:
        return -1
    if compiled:
        return kernel.nth_largest(kernel.sample(bits, mask, m), rank) - 1
    sample = bits[places(n, m)] & mask
    return int(np.partition(sample, m - rank)[m - rank]) - 1


def places(n: int, m: int) -> NDArray[np.int64]:
    """Return one place in each of m equal stretches of n elements, int64[m]: alike in all processes, without a pattern.

    Its distance from the start of the stretch is a hash of the stretch's number, of Murmur's kind, as a fraction of
    2**32.
    """
    number = np.arange(m, dtype=np.uint32)
    fraction = number * np.uint32(0x9E3779B1)
    fraction = (fraction ^ fraction >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    fraction = (fraction ^ fraction >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    fraction ^= fraction >> np.uint32(16)
    starts = number.astype(np.int64) * n // m
    return starts + (fraction.astype(np.uint64) * np.uint64(n // m) >> np.uint64(32)).astype(np.int64)
