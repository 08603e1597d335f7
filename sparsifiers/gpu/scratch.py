# SPDX-License-Identifier: Apache-2.0
"""Scratch of a selection beside its vector: a histogram, an edge, two bitmaps, counts; 0.26 bytes an element."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparsifiers.gpu.digits import BINS
from sparsifiers.gpu.row_table import RowTable

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
