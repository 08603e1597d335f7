# SPDX-License-Identifier: Apache-2.0
"""Permute [0, n) by a key, so that any subset of images can be computed by itself.

Numpy's generators may change their streams between versions; ranks must not draw different indices because
their numpy differs, so this one is written out.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def permuted(n: int, count: int, key: str) -> NDArray[np.uint32]:
    """Return the images of 0, ..., count - 1 under the permutation of [0, n) that `key` names: uint32[count], unique.

    0 <= count <= n <= 2**31; key: any text. Cost and memory are O(count).

    A Feistel network permutes [0, 2**bits), the smallest such range that covers
    [0, n): each round adds a hash of one half of the bits to the other half, which the same hash undoes. An image
    outside [0, n) is sent round again until it lands inside, as it must, because its cycle contains the
    element of [0, n) it came from; this walk is a permutation of [0, n) (Black and Rogaway, "Ciphers with
    Arbitrary Finite Domains", 2002). On average fewer than two walks are needed.
    """
    bits = max(2, (n - 1).bit_length())
    rounds = max(6, 32 - 2 * bits)  # even; a short range needs more: over 3 bits, 10 rounds show in a chi-square
    drawn = np.frombuffer(hashlib.shake_128(key.encode()).digest(8 * rounds), dtype="<u4")
    words = drawn.astype(np.uint32).reshape(rounds, 2)
    images = _feistel(np.arange(count, dtype=np.uint32), bits, words)
    outside = np.flatnonzero(images >= n)
    while len(outside):
        walked = _feistel(images[outside], bits, words)
        images[outside] = walked
        outside = outside[walked >= n]
    return images


def _feistel(values: NDArray[np.uint32], bits: int, words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Permute values in [0, 2**bits), uint32[m], in a round for each (factor, term) of words, uint32[rounds, 2]."""
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
