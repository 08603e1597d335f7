# SPDX-License-Identifier: Apache-2.0
"""Vote for one index set that all ranks share: which coordinates a rank may name, and how many. Pure functions.

The coordinates of a vector are dealt out to ranks like cards, by turns from step to step; a rank names the best of
its own by its own values. What ranks name cannot overlap, so together they name at most k, and the bytes of a vote do
not grow with the number of ranks. (SCAPE, arXiv 2607.01678, builds its masks shard by shard too.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from agmerge.exchanges.message import bits, smallest
from agmerge.exchanges.message.indices import in_order
from agmerge.tensors.layout import aligned

_GRAIN = 4  # bytes; every section of a message of votes starts on such a boundary


def share_of(rank: int, workers: int, step: int) -> int:
    """Return which share a rank judges in a step: the coordinates i with ``i % workers`` equal to it."""
    return (rank + step) % workers


def slots(k: int, workers: int) -> int:
    """Return the entries of one rank's vote on k coordinates, the same for every rank."""
    return -(-k // workers)


def quota(k: int, workers: int, share: int) -> int:
    """Return how many coordinates of its share a rank may name; over all shares that makes k."""
    return k // workers + (share < k % workers)


def vote(work: torch.Tensor, offered: torch.Tensor, share: int, workers: int, most: int) -> torch.Tensor:
    """Name at most ``most`` coordinates of a share: int64, in no order.

    ``work``: the vector, 1-D, not changed. ``offered``: the sparsifier's selection of it, int64, unique. Those in the
    share go first, by magnitude if they are too many; if they are less than 0.8 of ``most``, the largest others of
    the share fill up.
    """
    own = offered[offered % workers == share]
    if own.numel() > most:
        return own[work[own].abs().topk(most, sorted=False).indices]
    if 5 * own.numel() < 4 * most:
        others = work[share::workers].abs()
        others[own // workers] = -1.0
        best = others.topk(most - own.numel(), sorted=False).indices
        return torch.cat([own, best * workers + share])
    return own


def merge_votes(votes: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mask: the coordinates of one vector that the votes of all ranks name, int64, ascending."""
    return ascending(torch.cat(list(votes)))


def ascending(indices: torch.Tensor) -> torch.Tensor:
    """Return ``indices`` in order. On the host numpy takes a fourth of the time of torch."""
    if indices.device.type == "cpu":
        return torch.from_numpy(np.sort(indices.numpy()))
    return indices.sort().values


class VoteFormat:
    """Layout of one rank's votes: ``checksum | counts | votes``, each vote in the smallest index codec.

    An entry is a place in the rank's share, so no rank can name a coordinate of another rank's share.
    """

    lengths: Sequence[int]  # of the vectors that are voted on
    slots: Sequence[int]  # of each vote: the most that a rank may name of a vector
    workers: int
    size: int  # bytes, the same for every rank

    def __init__(self, lengths: Sequence[int], slots: Sequence[int], workers: int) -> None:
        self.lengths, self.slots, self.workers = lengths, slots, workers
        pairs = zip(lengths, slots, strict=True)
        self._codecs = [smallest(-(-length // workers), count, _GRAIN) for length, count in pairs]
        self._parts, end = [], bits.CRC_BYTES + 4 * len(slots)
        self._counts = slice(bits.CRC_BYTES, end)
        for codec, count in zip(self._codecs, slots, strict=True):
            size = codec.size if count else 0
            self._parts.append(slice(end, end + size))
            end += aligned(size, _GRAIN)
        self.size = end

    def write(self, named: Sequence[torch.Tensor], share: int, out: torch.Tensor) -> None:
        """Write into ``out``, uint8[size], the coordinates that a rank names: int64 by vector, in its ``share``."""
        counts = []
        for codec, part, length, names in zip(self._codecs, self._parts, self.lengths, named, strict=True):
            places = ascending((names - share) // self.workers).to(torch.int32)
            valid = bool(in_order(places, self._held(length, share)))
            counts.append(places.numel() if valid else -1)  # an index is out of range: other ranks must know
            if part.stop > part.start:
                room = places.new_zeros(codec.capacity)
                room[: places.numel()] = places
                codec.encode(room, max(counts[-1], 0), out[part])
        out[self._counts].view(torch.int32).copy_(torch.tensor(counts, dtype=torch.int32))
        bits.write_crc(out)

    def read(self, data: torch.Tensor, share: int) -> list[torch.Tensor] | None:
        """Return the coordinates that the rank with ``share`` names of each vector, int64, ascending.

        None if ``data``, uint8[size], is damaged, or names coordinates out of range.
        """
        counts = data[self._counts].view(torch.int32).tolist()
        fits = all(0 <= count <= most for count, most in zip(counts, self.slots, strict=True))
        if not fits or not bits.crc_fits(data):
            return None
        named = []
        for codec, part, length, count in zip(self._codecs, self._parts, self.lengths, counts, strict=True):
            places, good = codec.decode(data[part], count)
            if count and not bool(good & (places[-1] < self._held(length, share))):
                return None
            named.append(places.long() * self.workers + share)
        return named

    def _held(self, length: int, share: int) -> int:
        """Return how many coordinates of a vector are in a share."""
        return len(range(share, length, self.workers))
