# SPDX-License-Identifier: Apache-2.0
"""Places in a message: of indices and values, and of indices in bits, as `agmerge` lays them out on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slots:
    """Places and values of a selection; entries at and behind the count are 0.

    `indices` and `values` may be sections of a message.
    """

    indices: Tensor  # int32[capacity], ascending
    values: Tensor  # fp32, fp16 or bf16[capacity], as receivers will read them
    count: Tensor  # int32, 0-dim

    @classmethod
    def of(cls, capacity: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Slots:
        """Return new buffers, which hold anything: `gather` writes all of them."""
        indices = torch.empty(capacity, dtype=torch.int32, device=device)
        values = torch.empty(capacity, dtype=dtype, device=device)
        return cls(indices, values, torch.empty((), dtype=torch.int32, device=device))


WIDTHS = (16, 8, 4, 2)  # of planes, in their order
BITMAP, PLAIN = 0, -1  # in the place of `low`
TILE_BITS = 1024  # of the unary part that a program reads


@dataclass(frozen=True)
class IndexLayout:
    """Layout of the indices of up to `capacity` elements of a vector of `length` elements: a pure function of these.

    A section is a stream of bits in int32 words. In blocks of `2**low` elements the low bits of every slot stand side
    by side, in planes of 16, 8, 4 and 2 bits; behind them, in unary, how many slots lie in each block: slot j sets the
    bit `(index >> low) + j`. A bitmap has a bit an element instead, and plain indices are a word a slot.
    """

    length: int
    capacity: int
    low: int  # bits of a slot within its block: even, 2 to 30; or BITMAP, or PLAIN

    @property
    def planes(self) -> tuple[int, ...]:
        """Return the bit where the plane of each of `WIDTHS` begins, and then the unary part."""
        starts, start = [], 0
        for width in WIDTHS:
            starts.append(start)
            if self.low > 0 and self.low & width:
                start += 8 * -(-self.capacity * width // 8)
        return (*starts, start)

    @property
    def marks(self) -> int:
        """Return the bits of the unary part, or of the bitmap, in whole bytes; of plain indices all."""
        if self.low == PLAIN:
            return 32 * self.capacity
        bits = self.length if self.low == BITMAP else self.capacity + (max(self.length - 1, 0) >> self.low)
        return -(-bits // 8) * 8

    @property
    def words(self) -> int:
        """Return the int32 words of a section, the last one perhaps not whole."""
        return -(-(self.planes[-1] + self.marks) // 32)

    @property
    def tiles(self) -> int:
        """Return how many programs read the unary part of a rank."""
        return -(-self.marks // TILE_BITS)


@dataclass(frozen=True)
class IndexSection:
    """Section of a message with the indices of one rank."""

    layout: IndexLayout
    words: Tensor  # int32[layout.words]
