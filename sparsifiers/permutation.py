"""A keyed permutation of [0, n) of which any part can be computed by itself.

Numpy's generators may change their streams between versions; ranks must not draw different indices because
their numpy differs, so this one is written out.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def permuted(n: int, count: int, key: str) -> NDArray[np.uint32]:
    """Where the permutation of [0, n) that `key` names sends 0, 1, ..., count - 1: uint32[count], unique.

    0 <= count <= n <= 2**31. A Feistel network permutes [0, 2**bits), the smallest such range that covers
    [0, n): each round adds a hash of one half of the bits to the other half, which the same hash undoes. What
    lands outside [0, n) is sent round again until it lands inside, as it must, because its cycle contains the
    element of [0, n) it came from; this walk is a permutation of [0, n) (Black and Rogaway, "Ciphers with
    Arbitrary Finite Domains", 2002). On average fewer than two walks are needed. Cost and memory are O(count).
    """
    bits = max(2, (n - 1).bit_length())
    rounds = max(6, 32 - 2 * bits)  # even; a short range needs more: over 3 bits, 10 rounds show in a chi-square
    drawn = np.frombuffer(hashlib.shake_128(key.encode()).digest(8 * rounds), dtype="<u4")
    words = drawn.astype(np.uint32).reshape(rounds, 2)
    found = _feistel(np.arange(count, dtype=np.uint32), bits, words)
    outside = np.flatnonzero(found >= n)
    while len(outside):
        walked = _feistel(found[outside], bits, words)
        found[outside] = walked
        outside = outside[walked >= n]
    return found


def _feistel(values: NDArray[np.uint32], bits: int, words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    near = bits // 2
    far = bits - near
    left, right = values >> near, values & ((1 << near) - 1)
    for factor, term in words:
        # Multiply, add, shift: pairwise independent for 16 bits in and out (Dietzfelbinger, 1996).
        mixed = right * factor
        mixed += term
        mixed >>= 32 - far
        mixed ^= left
        left, right, near, far = right, mixed, far, near
    return ((left << near) | right).astype(np.uint32, copy=False)
