# SPDX-License-Identifier: Apache-2.0
"""Memory beside a vector: for a selection a histogram, an edge, two bitmaps, counts; and its largest key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsifiers.gpu.tables import RowTable

# Cut the 31 bits of an fp32 magnitude's key into digits, of which histograms are taken.
#
# The first digit is the exponent and three bits of the mantissa, so that a bin is an eighth of an octave: 12.5 % of a
# magnitude or less. All three digits are the whole key.

BINS = 2048  # of a histogram
KEY_BITS = 31  # of an fp32 number, its sign apart
MASK = (1 << KEY_BITS) - 1


class Digit(NamedTuple):
    """Place of a digit in a key."""

    shift: int  # bits below it
    bits: int  # its own


DIGITS = (Digit(20, 11), Digit(9, 11), Digit(0, 9))


# Scratch of a selection: 0.26 bytes an element.

TILE = 4096  # elements that a program marks and compacts: of a bitmap 128 words


class Scratch:
    """Buffers of a selection from a vector of `length` elements, on its device.

    They may be kept from step to step. Between selections the histogram is 0, unless it `is_counted`: its reader
    clears it.
    """

    def __init__(self, length: int, device: torch.device) -> None:
        self.length = length  # elements of the vector
        self.tiles = -(-length // TILE)
        words = self.tiles * TILE // 32
        self._all = torch.empty(BINS + 2 * words + 2 * self.tiles, dtype=torch.int32, device=device)
        self.histogram, self.above, self.ties, counts = torch.split(self._all, [BINS, words, words, 2 * self.tiles])
        # `above`: int32[words], a bit an element that is taken. `ties`: the same of those of which some are taken, the
        # ones of lowest index. `counts`: int32[tiles, 2], how many bits are set in both; after a compaction, how many
        # before a tile. Marking writes all of them.
        self.counts = counts.view(self.tiles, 2)
        # int32[3]: leading bits of the k-th largest key, how many with these bits are taken, and the first digit of
        # that key, of this selection or of the one before; 0: there was none.
        self.edge = torch.zeros(3, dtype=torch.int32, device=device)
        self.histogram.zero_()
        self.is_counted = False  # the histogram has the first digits of the vector as it is now
        self._rows: dict[tuple[tuple[int, ...], ...], RowTable] = {}  # by the shapes that the vector concatenates

    def count(self) -> None:
        """Record that the first digits of the vector are counted into the histogram."""
        self.is_counted = True

    def spend(self) -> None:
        """Record that the histogram has been read, and cleared."""
        self.is_counted = False

    def forget(self) -> None:
        """Clear a histogram that was not read: the vector changes. One launch; none where it is clear."""
        if self.is_counted:
            self.histogram.zero_()
            self.is_counted = False

    def clear(self) -> None:
        """Set all to 0, marks too. One launch."""
        self._all.zero_()
        self.is_counted = False

    def row_table(self, shapes: Sequence[Sequence[int]]) -> RowTable:
        """Return the rows of the vector, which concatenates tensors of `shapes`: kept, for they are constants."""
        key = tuple(map(tuple, shapes))
        if key not in self._rows:
            self._rows = {key: RowTable(key, self.edge.device)}
        return self._rows[key]


# The largest key.


class LargestKey:
    """Two places in turn: kernels of a step raise one to the largest key that they write, and clear the other.

    So no launch has to clear anything. All that is written in a step on one device may share them.
    """

    def __init__(self, device: torch.device) -> None:
        self._places = torch.split(torch.zeros(2, dtype=torch.int32, device=device), 1)
        self._magnitudes = [place.view(torch.float32)[0] for place in self._places]
        self._turn, self._is_raised = 0, False

    def begin(self) -> None:
        """Begin a step: its kernels raise the place that those of the step before have cleared."""
        if self._is_raised:
            self._turn, self._is_raised = 1 - self._turn, False

    def use(self) -> None:
        """Record that kernels of this step raise one place, and clear the other."""
        self._is_raised = True

    @property
    def now(self) -> Tensor:
        """Return the place that kernels of this step raise to their largest key: int32[1]."""
        return self._places[self._turn]

    @property
    def later(self) -> Tensor:
        """Return the place of the next step, which kernels of this one set to 0: int32[1]."""
        return self._places[1 - self._turn]

    @property
    def magnitude(self) -> Tensor:
        """Return the magnitude of this step's largest key: fp32, 0-dim, NaN if there was one; always the same view."""
        return self._magnitudes[self._turn]
