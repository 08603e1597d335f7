"""The k largest magnitudes of a vector in CPU memory, exactly, with scratch in the size of k.

The vector is read once, in blocks that stay in the cache. Keys above a floor are kept with their positions;
when more than twice k are held they are cut back to the k largest, and the floor rises to the smallest of
these. It may rise so far because positions ascend: of two equal keys the later one loses. A first floor
guessed from a sample makes the cuts rare, and has no say in the result.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsifiers.sampling import sampled_floor

BLOCK = 1 << 16  # elements; keys and flags of a block fit the second-level cache for every dtype


def largest_magnitudes(bits: NDArray[np.signedinteger[Any]], mask: int, k: int) -> NDArray[np.int32]:
    """Positions of the k largest keys `bits & mask`, int32[k], ascending; of equals the lowest.

    bits: signed integers [n] of any stride, not changed; mask: see `magnitude_mask`; 1 <= k <= n < 2**31.
    """
    n = len(bits)
    if k == n:
        return np.arange(n, dtype=np.int32)
    if n <= BLOCK:
        return largest(bits & mask, k).astype(np.int32)
    found = scan(bits, mask, k, sampled_floor(bits, mask, k))
    if len(found) < k:  # the sample was unlucky; every key is above -1
        found = scan(bits, mask, k, -1)
    return found


def scan(bits: NDArray[np.signedinteger[Any]], mask: int, k: int, floor: int) -> NDArray[np.int32]:
    """Positions of the k largest keys above `floor`, ascending; all of them where there are fewer than k."""
    n = len(bits)
    limit = max(2 * k, BLOCK // 8)
    positions = np.empty(min(n, limit + BLOCK), dtype=np.int32)
    keys = np.empty(len(positions), dtype=bits.dtype)
    scratch = np.empty(min(n, BLOCK), dtype=bits.dtype)
    flags = np.empty(len(scratch), dtype=np.bool_)
    held = 0
    for start in range(0, n, BLOCK):
        block = bits[start : start + BLOCK]
        magnitudes = np.bitwise_and(block, mask, out=scratch[: len(block)])
        hits = np.flatnonzero(np.greater(magnitudes, floor, out=flags[: len(block)]))
        end = held + len(hits)
        np.add(hits, start, out=positions[held:end], casting="unsafe")
        np.take(magnitudes, hits, out=keys[held:end], mode="clip")  # "raise" would buffer
        held = end
        if held > limit:
            kept = largest(keys[:held], k)
            held = k
            positions[:k], keys[:k] = positions[kept], keys[kept]
            floor = int(keys[:k].min())
    return positions[largest(keys[:held], k)]


def largest(keys: NDArray[np.signedinteger[Any]], k: int) -> NDArray[np.intp]:
    """Where the k largest of `keys` stand, ascending; of equals the first; all if k >= len(keys)."""
    size = len(keys)
    if k >= size:
        return np.arange(size)
    smallest = np.partition(keys, size - k)[size - k]
    chosen = keys > smallest
    ties = np.flatnonzero(keys == smallest)
    chosen[ties[: k - np.count_nonzero(chosen)]] = True
    return np.flatnonzero(chosen)
