# SPDX-License-Identifier: Apache-2.0
"""Quantised all-reduce in two phases: ZeRO++ (arXiv 2306.10209) and THC (NSDI 2024).

Numbers in few bits cannot be added up on their way, as a ring of floats does. So each rank owns a shard: it is sent
that shard by all, reads and adds, and sends the mean, quantised once more, to all. A rank sends 2 (W - 1) / W times its
message, where an all-gather of everything is (W - 1) times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Quantise(Protocol):
    """What receivers read of numbers that were sent in few bits.

    A quantiser that rounds at random draws by the phase, 0 or 1, the sending rank, and the place of the first element.
    """

    def __call__(self, values: Tensor, phase: int, sender: int, start: int) -> Tensor: ...


def in_rank_order(of_ranks: Sequence[Tensor]) -> Tensor:
    """Return the sum, added in one order: the order decides the last bit."""
    total = of_ranks[0].clone()
    for values in of_ranks[1:]:
        total += values
    return total


def gathered(tensors: Sequence[Tensor], quantise: Quantise, scale: float) -> Tensor:
    """Return ``scale`` times the sum of all ranks' tensors, 1-D, where each rank reads all messages: one phase."""
    return in_rank_order([quantise(values, 0, rank, 0) for rank, values in enumerate(tensors)]) * scale


def two_phase(tensors: Sequence[Tensor], quantise: Quantise, scale: float, block: int) -> Tensor:
    """Return the same of an all-to-all and an all-gather. Tensors and shards are whole blocks of ``block`` elements."""
    ranks, blocks = len(tensors), tensors[0].numel() // block
    cuts = [blocks * owner // ranks * block for owner in range(ranks + 1)]
    pieces = []
    for start, stop in zip(cuts, cuts[1:], strict=False):  # one turn for each owner
        rows = [quantise(values[start:stop], 0, rank, start) for rank, values in enumerate(tensors)]  # all-to-all
        total = in_rank_order(rows) * scale
        pieces.append(quantise(total, 1, 0, start))  # all-gather; by whom a shard is owned changes no bit of it
    return torch.cat(pieces)
