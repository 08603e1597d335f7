"""Keep what a selection needs beside its vector: a histogram, an edge, two bitmaps, counts; 0.26 bytes an element."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsifiers.gpu.digits import BINS

TILE = 4096  # elements that a program marks and compacts: of a bitmap 128 words


@dataclass(frozen=True)
class Scratch:
    """Hold the buffers of a selection from a vector of `length` elements. They are kept, and hold nothing of a step.

    Between selections the histogram is 0: who reads it clears it.
    """

    length: int  # elements of the vector
    histogram: Tensor  # int32[BINS]
    edge: Tensor  # int32[2]: leading bits of the k-th largest key, and how many with these bits are taken
    largest: Tensor  # int32[1]: the largest key that was written; at least that of infinity: something is not finite
    marks: Tensor  # int32[...]: all of the three below, so that one call clears them
    above: Tensor  # int32[words]: a bit an element that is taken
    ties: Tensor  # int32[words]: a bit an element of which some are taken, those of lowest index
    counts: Tensor  # int32[tiles, 2]: how many bits are set in both; after a compaction, how many before a tile

    @classmethod
    def of(cls, length: int, device: torch.device) -> Scratch:
        """Return new buffers."""
        tiles = -(-length // TILE)
        words = tiles * TILE // 32
        marks = torch.zeros(2 * words + 2 * tiles, dtype=torch.int32, device=device)
        above, ties, counts = torch.split(marks, [words, words, 2 * tiles])
        small = torch.zeros(BINS + 3, dtype=torch.int32, device=device)
        histogram, edge, largest = torch.split(small, [BINS, 2, 1])
        return cls(length, histogram, edge, largest, marks, above, ties, counts.view(tiles, 2))

    @property
    def tiles(self) -> int:
        """Return how many tiles the vector has."""
        return len(self.counts)
