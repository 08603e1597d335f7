# SPDX-License-Identifier: Apache-2.0
"""Blocks of many tensors, as a table, so that one launch writes or reads all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsifiers.gpu.sending import send

TILE = 2048  # coordinates of a program: 8 a thread, and whole blocks of any size
FIELDS = ("before", "number", "first", "blocks", "size", "length", "source", "target")  # int64, of a run in the table
_SOURCE, _TARGET = FIELDS.index("source"), FIELDS.index("target")


class BlockRun(NamedTuple):
    """Consecutive blocks of one tensor, with their records side by side."""

    number: int  # 64 bits, of the tensor: its words are drawn under a key of its own, see `key_within`
    size: int  # coordinates of a block
    first: int  # number of the first block in the tensor
    blocks: int
    length: int  # elements; zeros fill up the last block
    source: int = 0  # bytes before the records that are read, in each sender's message
    target: int = 0  # bytes before the records that are written


class BlockTable:
    """Runs of blocks that one launch takes: a constant of a plan. Of a call there are keys and addresses of tensors."""

    def __init__(self, runs: Sequence[BlockRun]) -> None:
        self.runs = tuple(runs)
        # Before each run so many programs have others; the last number is that of all programs.
        counts = [-(-run.blocks * run.size // TILE) for run in self.runs]
        before = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
        self.programs = int(before[-1])
        self.sizes = sum({run.size for run in self.runs})  # of blocks: the sum says which there are
        numbers = np.array([run.number for run in self.runs], dtype=np.uint64).view(np.int64)
        fields = [[run[field] for run in self.runs] for field in range(1, len(BlockRun._fields))]
        size, first, blocks, length, source, target = (np.array(one, dtype=np.int64) for one in fields)
        self._rows = np.stack([before[:-1], numbers, first, blocks, size, length, source, target], axis=1)

    def part(self, chosen: Sequence[int]) -> BlockTable:
        """Return the table of some runs, by their numbers."""
        return BlockTable([self.runs[one] for one in chosen])

    def send(
        self,
        device: torch.device,
        keys: Sequence[int],
        *,
        sources: Sequence[int] | None = None,
        targets: Sequence[int] | None = None,
    ) -> Tensor:
        """Return what a kernel reads, int64[runs * FIELDS + keys], of which a copy to the device is queued.

        keys: of 64 bits. sources, targets: addresses of tensors, by run, in place of the bytes; 0: there is none.
        """
        words = np.empty(self._rows.size + len(keys), dtype=np.int64)
        rows = words[: self._rows.size].reshape(self._rows.shape)
        rows[:] = self._rows
        for field, addresses in ((_SOURCE, sources), (_TARGET, targets)):
            if addresses is not None:
                rows[:, field] = addresses
        words[self._rows.size :] = np.array(keys, dtype=np.uint64).view(np.int64)
        return send(words, torch.empty(len(words), dtype=torch.int64, device=device))
