"""Votes for one index set that all ranks share: who may name which coordinates, and how many. Pure functions.

The coordinates of a vector are dealt out to ranks like cards, by turns from step to step; a rank names the best of
its own by its own values. What ranks name cannot overlap, so together they name what there is room for, and the
bytes of a vote do not grow with the number of ranks. (SCAPE, arXiv 2607.01678, builds its masks shard by shard too.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agmerge.exchanges.message import bits, smallest
from agmerge.exchanges.message.indices import in_order
from agmerge.tensors.layout import aligned

_GRAIN = 4  # bytes; everything on a paper starts on such a boundary


def share_of(rank: int, workers: int, step: int) -> int:
    """Which share a rank judges in a step: the coordinates i with ``i % workers`` equal to it."""
    return (rank + step) % workers


def slots(k: int, workers: int) -> int:
    """Slots of a ballot, the same for every rank."""
    return -(-k // workers)


def quota(k: int, workers: int, share: int) -> int:
    """How many of its share a rank may name; over all shares that makes k."""
    return k // workers + (share < k % workers)


def ballot(work: torch.Tensor, offered: torch.Tensor, share: int, workers: int, most: int) -> torch.Tensor:
    """What a rank names: at most ``most`` coordinates of its share, int64, in no order.

    ``work``: the vector, 1-D, not changed. ``offered``: what the sparsifier chose of it, int64, unique. Those in the
    share go first, by magnitude if they are too many; if they are less than 0.8 of ``most``, the largest others of
    the share fill up.
    """
    mine = offered[offered % workers == share]
    if mine.numel() > most:
        return mine[work[mine].abs().topk(most, sorted=False).indices]
    if 5 * mine.numel() < 4 * most:
        others = work[share::workers].abs()
        others[mine // workers] = -1.0
        rest = others.topk(most - mine.numel(), sorted=False).indices
        return torch.cat([mine, rest * workers + share])
    return mine


class VoteFormat:
    """The ballots of one rank in ``size`` bytes: ``checksum | counts | ballots``, each in the smallest index codec.

    Vectors have ``lengths``, ballots ``slots``. What stands there is a place in the share, so nobody can name what is
    another's to judge.
    """

    def __init__(self, lengths: Sequence[int], slots: Sequence[int], workers: int) -> None:
        self.lengths, self.slots, self.workers = lengths, slots, workers
        pairs = zip(lengths, slots, strict=True)
        self.codecs = [smallest(-(-length // workers), count, _GRAIN) for length, count in pairs]
        self.parts, end = [], bits.CRC_BYTES + 4 * len(slots)
        self.counts = slice(bits.CRC_BYTES, end)
        for codec, count in zip(self.codecs, slots, strict=True):
            size = codec.size if count else 0
            self.parts.append(slice(end, end + size))
            end += aligned(size, _GRAIN)
        self.size = end

    def write(self, named: Sequence[torch.Tensor], share: int, out: torch.Tensor) -> None:
        """Fill ``out``, uint8[size], with what a rank names of each vector: int64, of its share, in no order."""
        counts = []
        for codec, part, length, some in zip(self.codecs, self.parts, self.lengths, named, strict=True):
            places = ((some - share) // self.workers).sort().values.to(torch.int32)
            valid = bool(in_order(places, self._held(length, share)))
            counts.append(places.numel() if valid else -1)  # what somebody selected is not there: others must know
            if part.stop > part.start:
                room = places.new_zeros(codec.capacity)
                room[: places.numel()] = places
                codec.encode(room, max(counts[-1], 0), out[part])
        out[self.counts].view(torch.int32).copy_(torch.tensor(counts, dtype=torch.int32))
        bits.write_crc(out)

    def read(self, data: torch.Tensor, share: int) -> list[torch.Tensor] | None:
        """What the rank that judges ``share`` names of each vector, int64, ascending; None if ``data`` is damaged."""
        counts = data[self.counts].view(torch.int32).tolist()
        fits = all(0 <= count <= most for count, most in zip(counts, self.slots, strict=True))
        if not fits or not bits.crc_fits(data):
            return None
        named = []
        for codec, part, length, count in zip(self.codecs, self.parts, self.lengths, counts, strict=True):
            places, good = codec.decode(data[part], count)
            if count and not bool(good & in_order(places, self._held(length, share))):
                return None
            named.append(places.long() * self.workers + share)
        return named

    def _held(self, length: int, share: int) -> int:
        return len(range(share, length, self.workers))


def counted(ballots: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mask: what all ballots name, int64, ascending."""
    return torch.cat(list(ballots)).sort().values
