"""A guess of the k-th largest magnitude from a small sample, low on purpose.

The guess only has to be cheap and seldom too high: whoever uses it counts what it finds.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

SAMPLES = 5.0  # times cbrt(k * n); for a key carried in vain that costs five times a sample (measured)


def sampled_floor(bits: NDArray[np.signedinteger[Any]], mask: int, k: int) -> int:
    """A key that, but for one call in ten thousand, at least k of the keys `bits & mask` exceed.

    bits: signed integers [n], n >= 8; mask: see `magnitude_mask`. One element is read at a random place in
    each of m equal stretches: the stretches keep the sample's spread below that of independent draws, the
    random places keep a period in the data from matching the stride. The sample holds about p = m * k / n of
    the k largest, with standard deviation below sqrt(p); taking the (p + 4 sqrt(p) + 1)-th largest leaves
    four of them as a margin. -1, which every key exceeds, if the sample is too small for that.

    m balances the two costs, reading samples against carrying about 4 n sqrt(p) / m keys too many: their sum
    is least where m grows as the cube root of k * n.
    """
    n = len(bits)
    m = min(n // 8, math.ceil(SAMPLES * (k * n) ** (1 / 3)))
    starts = np.arange(m, dtype=np.int64) * n // m
    sample = bits[starts + np.random.default_rng(0).integers(n // m, size=m)] & mask
    expected = m * k / n
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 1)
    if rank > m:
        return -1
    return int(np.partition(sample, m - rank)[m - rank]) - 1
