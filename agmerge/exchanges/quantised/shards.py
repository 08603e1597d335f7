# SPDX-License-Identifier: Apache-2.0
"""Cut a message into shards, one an owner: pure functions, with the same results on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from agmerge.tensors.layout import ALIGNMENT, Segment, Slot, aligned
from sparsifiers.quantising.blocks import block_size, blocks_in


@dataclass(frozen=True)
class Piece:
    """Consecutive blocks of one tensor that lie in one shard."""

    slot: Slot
    size: int  # coordinates of a block
    first: int  # number of the first of them in the tensor
    blocks: int

    @cached_property
    def elements(self) -> slice:
        """Elements of the tensor, 1-D, that the blocks cover; zeros fill up its last block."""
        return slice(self.first * self.size, min((self.first + self.blocks) * self.size, self.slot.numel))


@dataclass(frozen=True)
class Run:
    """Consecutive elements of a segment that travel as they are, in one shard."""

    segment: Segment
    start: int  # counted from the first of the segment
    stop: int

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the elements, in the gradient's dtype."""
        return (self.stop - self.start) * self.segment.tensor_class.dtype.itemsize


def cut_blocks(slots: Sequence[Slot], shards: int) -> list[list[Piece]]:
    """Return the pieces of each shard: whole blocks in the order of ``slots``, about as many coordinates a shard.

    A block lies where its first coordinate does, counted over all blocks.
    """
    sizes = [block_size(slot.shape) for slot in slots]
    total = sum(blocks_in(slot.numel, size) * size for slot, size in zip(slots, sizes, strict=True))
    each = -(-total // shards)
    pieces: list[list[Piece]] = [[] for _ in range(shards)]
    before = 0  # coordinates of the tensors that came first
    for slot, size in zip(slots, sizes, strict=True):
        blocks = blocks_in(slot.numel, size)
        for shard in range(before // each, (before + blocks * size - 1) // each + 1):
            first = max(0, -(-(shard * each - before) // size))
            stop = min(blocks, -(-((shard + 1) * each - before) // size))
            if first < stop:
                pieces[shard].append(Piece(slot, size, first, stop - first))
        before += blocks * size
    return pieces


def cut_plain(segments: Sequence[Segment], shards: int) -> list[list[Run]]:
    """Return the runs of each shard: of every segment about as many elements."""
    runs: list[list[Run]] = [[] for _ in range(shards)]
    for segment in segments:
        each = aligned(-(-segment.length // shards), ALIGNMENT)
        for shard in range(shards):
            start, stop = shard * each, min((shard + 1) * each, segment.length)
            if start < stop:
                runs[shard].append(Run(segment, start, stop))
    return runs
