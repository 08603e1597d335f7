# SPDX-License-Identifier: Apache-2.0
"""Find the k largest magnitudes of a vector in CPU memory, exactly, with scratch in the size of k.

The vector is read once, in blocks that stay in the cache. Keys above a floor are kept with their positions;
when more than twice k are held they are cut back to the k largest, and the floor rises to the smallest of
these. It may rise so far because positions ascend: of two equal keys the later one loses. A first floor
guessed from a sample makes the cuts rare, and has no say in the result. Vectors that `kernel` can read are scanned and
cut by compiled loops, with the same result.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsifiers import kernel
from sparsifiers.topk_floor import sampled_floor

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
