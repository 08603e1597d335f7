# SPDX-License-Identifier: Apache-2.0
"""Decide which rank adds up which region of a vector, and which share of the result it has: pure functions.

Regions follow the selections, not the length of the vector: gradients are never evenly large. Every rank tells the
others a few of its indices at equal distances in its selection, and from all of them the cuts follow. That is the
partition of Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (PPoPP 2022), section
3.1.1, but made anew in each step, and from more points than one a region, so that regions are balanced
whatever the distribution: see `bounds`. Every rank computes the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

POINTS = 256  # indices that a rank tells at most; a region's load is known to a 256th of all selections


def number(k: int) -> int:
    """Return how many indices a rank tells of ``k`` or fewer: every fourth, up to `POINTS`."""
    return min(POINTS, -(-k // 4))


def sample(indices: torch.Tensor, count: int | torch.Tensor, number: int) -> torch.Tensor:
    """Return the last index of each of ``number`` equal chunks of the first ``count`` ``indices``, ascending: int32.

    The entry of an empty chunk means nothing. ``count`` may be on a device; nothing waits for it.
    """
    if not indices.numel():
        return torch.zeros(number, dtype=torch.int32, device=indices.device)
    ends = torch.arange(1, number + 1, device=indices.device) * count // number
    return indices.index_select(0, (ends - 1).clamp_(min=0)).to(torch.int32)


def bounds(points: NDArray[np.int64], counts: Sequence[int], length: int) -> list[int]:
    """Return the cuts [0, ..., length], W + 1 of them, never falling: region j is from cut j up to cut j + 1.

    ``points``: [W, number], every rank's `sample` of its ``counts[rank]`` indices below ``length``. A region gets at
    most ``total / W`` indices, the largest chunk, and a chunk of every rank.
    """
    workers, number = points.shape
    masses = np.diff(np.outer(np.asarray(counts, dtype=np.int64), np.arange(number + 1)) // number, axis=1)
    order = np.argsort(points, axis=None, kind="stable")
    reached = np.cumsum(masses.ravel()[order])
    goals = np.arange(1, workers) * int(reached[-1]) // workers
    cuts = points.ravel()[order][np.searchsorted(reached, goals)] + 1
    return [0, *np.clip(cuts, 0, length).tolist(), length]


def split(indices: torch.Tensor, cuts: Sequence[int]) -> list[int]:
    """Count how many of ``indices``, ascending, are in each region between ``cuts``."""
    inner = torch.tensor(cuts[1:-1], dtype=indices.dtype, device=indices.device)
    places = [0, *torch.searchsorted(indices, inner).tolist(), indices.numel()]
    return [stop - start for start, stop in zip(places, places[1:], strict=False)]


def shares(total: int, workers: int) -> list[int]:
    """Return ``total`` in equal shares, one a rank; the last ones may be shorter, or 0."""
    part = -(-total // workers)
    return [min(part, max(0, total - rank * part)) for rank in range(workers)]


def moves(held: Sequence[int], wanted: Sequence[int]) -> list[list[int]]:
    """Return how many elements of one sequence change hands, [from][to]; rank r holds ``held[r]`` of it, in order.

    Afterwards it holds ``wanted[r]``, with the same sum, in the same order.
    """
    starts, goals = ([0, *accumulate(counts)] for counts in (held, wanted))
    return [
        [max(0, min(starts[a + 1], goals[b + 1]) - max(starts[a], goals[b])) for b in range(len(wanted))]
        for a in range(len(held))
    ]


def covered(table: Sequence[Sequence[int]], parts: Sequence[range]) -> list[range]:
    """Return where elements lie, by rank, after they changed hands: ``table`` by `moves`, from regions ``parts``."""
    ranges = []
    for column in zip(*table, strict=True):
        givers = [part for part, count in zip(parts, column, strict=True) if count]
        ranges.append(range(givers[0].start, givers[-1].stop) if givers else range(0))
    return ranges
