# SPDX-License-Identifier: Apache-2.0
"""Exact search for the k largest magnitudes of a vector in CPU memory, with scratch in the size of k.

The vector is read once, in blocks that stay in the cache. Keys above a floor are kept with their positions; when more
than twice k are held they are cut back to the k largest, and the floor rises to the smallest of these. It may rise so
far because positions ascend: of two equal keys the later one loses. A first floor guessed from a sample makes the cuts
rare, and has no say in the result. Vectors that `kernel` can read are scanned and cut by compiled loops, with the same
result.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsifiers import kernel

# Keys: magnitudes as integers, the bits of a float without its sign bit.
#
# Sign-magnitude formats (IEEE 754 and bfloat16) are laid out so that these integers rise with |a|: zeros of both signs
# are 0, subnormals, normals and inf follow in order, and NaN comes after inf. One integer comparison therefore serves
# every dtype, and does not depend on the flush-to-zero mode of the thread. It treats NaN as the largest value without a
# special case (two NaNs compare by their payload).

INTEGERS = {  # of the same width, by float
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def bit_view(vector: Tensor) -> Tensor:
    """View a float tensor as signed integers of the same width: the same storage, the same strides."""
    return vector.view(INTEGERS[vector.dtype])


def magnitude_mask(dtype: torch.dtype) -> int:
    """Return the integer that clears the sign bit: bit_view(vector) & mask is the magnitude's key, in [0, mask]."""
    return int(torch.iinfo(INTEGERS[dtype]).max)


# A floor: the k-th largest magnitude, guessed from a small sample, low on purpose. The guess only has to be cheap and
# seldom too high, because its callers count the elements above it.

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


# The search.

BLOCK = 1 << 16  # elements; keys and flags of a block fit the second-level cache for every dtype
KEPT = 1 << 20  # slots of the compiled scan that a thread keeps for the next, 12 MB at most
FEW = 1 << 12  # elements up to which the compiled loops do without a sample


def largest_magnitudes(bits: NDArray[np.signedinteger[Any]], mask: int, k: int) -> NDArray[np.int32]:
    """Return the positions of the k largest keys `bits & mask`, int32[k], ascending; of equals the lowest.

    bits: signed integers [n] of any stride, not changed; mask: see `magnitude_mask`; 1 <= k <= n < 2**31.
    """
    n = len(bits)
    if k == n:
        return np.arange(n, dtype=np.int32)
    if kernel.reads(bits):
        if n <= FEW:
            return scan(bits, mask, k, -1)
    elif n <= BLOCK:
        return largest(bits & mask, k).astype(np.int32)
    positions = scan(bits, mask, k, sampled_floor(bits, mask, k))
    if len(positions) < k:  # the sample was unlucky; every key is above -1
        positions = scan(bits, mask, k, -1)
    return positions


def scan(bits: NDArray[np.signedinteger[Any]], mask: int, k: int, floor: int) -> NDArray[np.int32]:
    """Return the positions of the k largest keys above `floor`, ascending; all of these where there are fewer.

    Reads the vector once. bits: signed integers [n] of any stride, not changed; mask: see `magnitude_mask`; floor: -1
    lets all keys through. int32[at most k]; of equals the lowest.
    """
    if kernel.reads(bits):
        return _compiled_scan(bits, mask, k, floor)
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


def counted_scan(
    bits: NDArray[np.signedinteger[Any]], mask: int, k: int, floor: int, most: int
) -> tuple[NDArray[np.int32], int]:
    """Return the positions of `scan`, and how many keys exceed `floor`; most + 1 for all larger counts. most >= k."""
    if kernel.reads(bits):
        return _compiled_counted_scan(bits, mask, k, floor, most)
    positions = scan(bits, mask, most + 1, floor)
    count = len(positions)
    return positions if count <= k else positions[largest(bits[positions] & mask, k)], count


def _compiled_scan(bits: NDArray[np.int32], mask: int, k: int, floor: int) -> NDArray[np.int32]:
    return _compiled_counted_scan(bits, mask, k, floor, k)[0]


def _compiled_counted_scan(
    bits: NDArray[np.int32], mask: int, k: int, floor: int, most: int
) -> tuple[NDArray[np.int32], int]:
    # Where the loops stop early, more than `most` are held; after a cut at least one more block fits, so every turn
    # gets on.
    n = len(bits)
    slots = min(n, most + max(k, 8 * kernel.BLOCK))
    positions: NDArray[np.int32]
    positions, keys, scratch = workspace(slots)
    held = stop = count = 0
    while stop < n:
        stop, held = kernel.scan(bits, stop, mask, floor, positions, keys, held)
        count = max(count, held)
        if held > k:
            floor, held = kernel.cut(positions, keys, held, k, scratch), k
    return positions[:held].copy(), min(count, most + 1)


def workspace(slots: int) -> NDArray[np.int32]:
    """Return scratch of this thread, int32[3, slots], with anything in it."""
    # Memory fresh from the system costs a fault a page, a tenth of the scan; so a thread keeps its last scratch.
    if slots > KEPT:
        return np.empty((3, slots), dtype=np.int32)
    if _thread.workspace.shape[1] < slots:
        _thread.workspace = np.empty((3, slots), dtype=np.int32)
    return _thread.workspace[:, :slots]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.workspace: NDArray[np.int32] = np.empty((3, 0), dtype=np.int32)


_thread = _Thread()


def largest(keys: NDArray[np.signedinteger[Any]], k: int) -> NDArray[np.intp]:
    """Return where the k largest of `keys` stand, ascending; of equals the first; all if k >= len(keys)."""
    size = len(keys)
    if k >= size:
        return np.arange(size)
    if kernel.reads(keys):
        kept = np.arange(size, dtype=np.int32)
        kernel.cut(kept, keys.copy(), size, k, np.empty(size, dtype=np.int32))
        return kept[:k].astype(np.intp)
    smallest = np.partition(keys, size - k)[size - k]
    chosen = keys > smallest
    ties = np.flatnonzero(keys == smallest)
    chosen[ties[: k - np.count_nonzero(chosen)]] = True
    return np.flatnonzero(chosen)
