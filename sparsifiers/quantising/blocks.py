# SPDX-License-Identifier: Apache-2.0
"""Cut tensors into blocks that share a scale: a pure function of the shape."""

from __future__ import annotations

import math
from collections.abc import Sequence

VERSION = 2  # of blocks, levels, scales and random words: with another one the same gradients become other bits
LARGEST = 256  # coordinates of a block; 1024 and 4096 cost 1 % of a small GPT's loss, 64 to 256 nothing
LEAST = 64  # a scale of 16 bits then costs a quarter of a bit a coordinate


def block_size(shape: Sequence[int]) -> int:
    """Return the coordinates of each block of a tensor of this shape: 64, 128 or 256.

    It is the largest of these that divides a row, so that no block spans two of them: a row without a gradient,
    of an embedding or an expert, stays exactly zero, and small rows are not drowned by large ones. Where none does, it
    is 256, and blocks go across rows. A row has one index of the first dimension. Where blocks mix zeros and others,
    quantisers keep the zeros.
    """
    row = math.prod(shape[1:]) if len(shape) > 1 else math.prod(shape)
    size = math.gcd(row, LARGEST)
    return size if size >= LEAST else LARGEST


def blocks_in(numel: int, size: int) -> int:
    """Return how many blocks so many elements have; zeros fill up the last one."""
    return -(-numel // size)
