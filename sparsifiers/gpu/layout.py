# SPDX-License-Identifier: Apache-2.0
"""Lay out indices in the bits of a message, as `agmerge` does on the host."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

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
