# SPDX-License-Identifier: Apache-2.0
"""Find the k largest of a vector that no rank has whole, by a histogram of magnitudes that is added up.

A bin is an exponent and the first three bits of the mantissa, so it is an eighth of a power of two wide. Larger
magnitudes are in later bins: the first round of a radix selection. One round is enough here, since elements
of the bin at the edge, kept or left for later steps, differ by 12.5 % at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

BINS = 2048
_SHIFT = 20  # of the 23 bits of a float32's mantissa: three are left
_MAGNITUDE = 0x7FFFFFFF


def bin_of(values: torch.Tensor) -> torch.Tensor:
    """Return the bin of each of ``values``, float32 or float64: int32, 0 for zero and nothing else, the last for NaN.

    float64 goes by its float32, which is in the same order; values that are zero or infinite there share a bin.
    """
    bins = (values.float().view(torch.int32) & _MAGNITUDE) >> _SHIFT
    return torch.maximum(bins, (values != 0).to(torch.int32))


def bin_counts(bins: torch.Tensor) -> torch.Tensor:
    """Return how many are in each bin: int32[BINS]."""
    return torch.bincount(bins, minlength=BINS).to(torch.int32)


def crossing(counts: torch.Tensor, k: int) -> tuple[int, int]:
    """Return (edge, room): all of the bins above ``edge`` are among the ``k`` largest, and ``room`` of bin ``edge``.

    ``counts``: int32[BINS], of all ranks together. (-1, 0) if there are no more than ``k``: all of them are.
    """
    larger = counts.to(torch.int64).flip(0).cumsum(0)  # larger[i]: in the last i + 1 bins
    if int(larger[-1]) <= k:
        return -1, 0
    place = int(torch.searchsorted(larger, k, right=True))
    above = int(larger[place - 1]) if place else 0
    return len(counts) - 1 - place, k - above


def allotted(at_edge: Sequence[int], room: int) -> list[int]:
    """Return how many of its ``at_edge[rank]`` elements each rank may keep of ``room``, the first ranks first."""
    before = [0, *accumulate(at_edge)]
    return [min(max(room - earlier, 0), own) for earlier, own in zip(before, at_edge, strict=False)]


def kept_in_bins(bins: torch.Tensor, edge: int, take: int) -> torch.Tensor:
    """Return which elements are above bin ``edge``, or the first ``take`` of it: bool, in the shape of ``bins``."""
    mask = bins > edge
    mask[(bins == edge).nonzero().view(-1)[:take]] = True
    return mask
