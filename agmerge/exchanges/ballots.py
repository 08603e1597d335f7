"""Votes for one index set that all ranks share: who may name which coordinates, and how many. Pure functions.

The coordinates of a vector are dealt out to ranks like cards, by turns from step to step; a rank names the best of
its own by its own values. What ranks name cannot overlap, so together they name what there is room for, and the
bytes of a vote do not grow with the number of ranks. (SCAPE, arXiv 2607.01678, builds its masks shard by shard too.)
"""

from __future__ import annotations

import torch

EMPTY = -1  # a slot of a ballot that names nothing


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


def stuffed(ballots: torch.Tensor, length: int, step: int) -> int | None:
    """The first rank whose ballot names what it may not; ``ballots``: int32 (W, slots) of a vector of ``length``."""
    workers = ballots.shape[0]
    shares = (torch.arange(workers, device=ballots.device) + step) % workers
    allowed = (ballots >= 0) & (ballots < length) & (ballots % workers == shares[:, None])
    wrong = ~(allowed | (ballots == EMPTY)).all(dim=1)
    return int(wrong.nonzero()[0]) if wrong.any() else None


def counted(ballots: torch.Tensor) -> torch.Tensor:
    """The mask: what all ballots name, int64, ascending, each once."""
    named: torch.Tensor = torch.unique(ballots[ballots != EMPTY])
    return named.long()
