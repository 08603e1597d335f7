# SPDX-License-Identifier: Apache-2.0
"""Random-k: coordinates drawn by lot, the same ones on all ranks."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsifiers.base import Request, Selection, Sparsifier

# A permutation of [0, n) by a key, of which any subset of images can be computed by itself. Numpy's generators may
# change their streams between versions; ranks must not draw different indices because their numpy differs, so this one
# is written out.


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


class RandomK(Sparsifier):
    """Sparsifier of k coordinates drawn uniformly without replacement, independent of their values.

    The draw depends on (seed, key, step) and the length alone, so all ranks hold the same indices without a message,
    and an exchange need not send them; two keys, or two steps of one key, draw apart. With a larger k the same
    draw goes on, so indices drawn for less are among them. count is always k, no value is read, and the cost is
    O(k). No generator of the process is touched.

    Its residual has (1 - k/n) ||a||^2 on average: all that top-k guarantees at worst, and far more than it
    leaves in practice (Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018): the baseline
    that a sparsifier has to beat, and a choice for networks where only an all-reduce is fast. Values are sent as
    they are; scaling them by n/k would be right without a residual only. Ours: the draw (the reference seeds
    the process's generator, with a sum that different names share).

    seed: any integer; the same on every rank.
    """

    name = "randomk"
    same_on_all_ranks = True  # no value is read: (seed, key, step) and the length decide

    def __init__(self, density: float = 0.01, seed: int = 0) -> None:
        super().__init__(density)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"{self.name}: seed must be an int, got {seed!r}")
        self.seed = seed

    def _select(self, vector: Tensor, request: Request) -> Selection:
        return Selection(self._draw(vector.numel(), request), request.k)

    def _select_on_device(self, vector: Tensor, request: Request) -> Selection:
        indices = self._draw(vector.numel(), request)
        if vector.device.type == "cuda":
            indices = indices.pin_memory()  # from pageable memory the copy would wait for the device
        return Selection(indices.to(vector.device, non_blocking=True), request.k)

    def _draw(self, numel: int, request: Request) -> Tensor:
        """Return k places in [0, numel) in CPU memory, int32[k], ascending; the same for an equal request."""
        drawn = permuted(numel, request.k, f"{self.seed}/{request.step}/{request.key}")
        return torch.from_numpy(np.sort(drawn).astype(np.int32))

    def options(self) -> dict[str, object]:
        return {"seed": self.seed}
