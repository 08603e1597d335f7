# SPDX-License-Identifier: Apache-2.0
"""Tables of many tensors, rows or blocks, so that one launch takes them all; numbers are sent without a wait."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsifiers.rows import deal, matrices


def send(numbers: Sequence[int] | Sequence[Sequence[int]] | NDArray[Any], out: Tensor) -> Tensor:
    """Queue a copy of `numbers`, as many as there are in `out`, to `out`, and return that; the host does not wait.

    The copy is one of pinned memory, which torch gives away again only when it has been made.
    """
    values = torch.as_tensor(numbers, dtype=out.dtype)
    if out.is_cuda:
        values = values.pin_memory()  # torch.tensor(..., pin_memory=True) refuses numpy's arrays
    return out.copy_(values.view(out.shape), non_blocking=True)


# Tensors of a slice.

BLOCK = 2048  # elements of a task


class TensorTable:
    """Places of a merge buffer's tensors in its slice, cut into tasks of `BLOCK` elements.

    It is a constant of the plan; only the addresses of gradients change from step to step. Tables are
    sent to the device when a kernel first needs them.
    """

    def __init__(self, offsets: Sequence[int], lengths: Sequence[int], device: torch.device) -> None:
        """Take where in the slice each tensor begins, and how many elements it has."""
        self.offsets, self.lengths, self._device = tuple(offsets), tuple(lengths), device
        self._are_offsets_aligned = all(offset % 16 == 0 for offset in self.offsets)
        # What `addresses` has returned last, and for which addresses: mostly they are those of the step before.
        self._addresses: tuple[list[int], tuple[Tensor, bool]] | None = None

    @cached_property
    def places(self) -> Tensor:
        """Return offset and length of each tensor: int32[tensors, 2]."""
        rows = list(zip(self.offsets, self.lengths, strict=True))
        return send(rows, torch.empty(len(rows), 2, dtype=torch.int32, device=self._device))

    @cached_property
    def tasks(self) -> Tensor:
        """Return a tensor and the first of its elements that the task takes: int32[tasks, 2]."""
        rows = [(i, start) for i, length in enumerate(self.lengths) for start in range(0, length, BLOCK)]
        return send(rows, torch.empty(len(rows), 2, dtype=torch.int32, device=self._device))

    def check(self, gradients: Sequence[Tensor | None]) -> torch.dtype:
        """Return the dtype of `gradients`; fp32 where there are none.

        ValueError unless they are one a tensor, of its length, contiguous, and all of one dtype of 16 or 32 bits.
        """
        if len(gradients) != len(self.lengths):
            raise ValueError(f"the table has {len(self.lengths)} tensors, got {len(gradients)} gradients")
        dtypes = set()
        for i, (gradient, length) in enumerate(zip(gradients, self.lengths, strict=True)):
            if gradient is not None:
                dtypes.add(gradient.dtype)
                if gradient.numel() != length or not gradient.is_contiguous():
                    raise ValueError(
                        f"gradient {i} has shape {tuple(gradient.shape)} and strides {gradient.stride()}, but the "
                        f"table requires {length} contiguous elements"
                    )
        if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float16, torch.bfloat16}:
            raise ValueError(f"gradients of a table must have one dtype, fp32, fp16 or bf16, got {dtypes}")
        return dtypes.pop() if dtypes else torch.float32

    def addresses(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor, bool]:
        """Return where the elements of `gradients` lie, 0 for none: int64[tensors].

        A copy is queued if they have changed since the last call. Also returns whether tensors start where 16 bytes
        do: all addresses are multiples of 16, and all offsets of 16 elements.
        """
        found = [0 if gradient is None else gradient.data_ptr() for gradient in gradients]
        if self._addresses is None or self._addresses[0] != found:
            aligned = self._are_offsets_aligned and all(place % 16 == 0 for place in found)
            sent = send(found, torch.empty(len(found), dtype=torch.int64, device=self._device))
            self._addresses = found, (sent, aligned)
        return self._addresses[1]


class Momenta(NamedTuple):
    """Momentum of deep gradient compression, as slices like `work`."""

    before: Tensor  # fp32[n], of the last step
    after: Tensor  # fp32[n], written
    factor: float  # m, of all tensors of the table
    nesterov: bool = False


# Rows of the tensors of a vector.

PANEL = 8  # rows that a program takes at once: of columns that lie side by side, 32 bytes


class RowTable:
    """Rows of the tensors of a vector, cut into panels: a constant of the plan.

    Only the shares change from step to step. Tables are sent to the device when a kernel first needs them.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], device: torch.device) -> None:
        """Take the shapes of the tensors that the vector concatenates."""
        self.tensors = matrices(shapes)
        self._device = device

    @cached_property
    def places(self) -> Tensor:
        """Return offset, rows, length, from row to row and from place to place of each tensor: int32[tensors, 5]."""
        steps = [(1, one.rows) if one.columns else (one.length, 1) for one in self.tensors]
        rows = [(one.offset, one.rows, one.length, *step) for one, step in zip(self.tensors, steps, strict=True)]
        return send(rows, torch.empty(len(rows), 5, dtype=torch.int32, device=self._device))

    @cached_property
    def panels(self) -> Tensor:
        """Return a tensor and the first row of it that a program takes: int32[panels, 2]."""
        rows = [(i, row) for i, one in enumerate(self.tensors) for row in range(0, one.rows, PANEL)]
        return send(rows, torch.empty(len(rows), 2, dtype=torch.int32, device=self._device))

    def shares(self, k: int, turn: int) -> Tensor:
        """Return each tensor's share of k in one turn, see `sparsifiers.rows.deal`: int32[tensors, 3].

        Of each row so many, how many rows get one more, and the first of these. Queues a copy.
        """
        rows = [(*divmod(share.count, share.matrix.rows), share.start) for share in deal(self.tensors, k, turn)]
        return send(rows, torch.empty(len(rows), 3, dtype=torch.int32, device=self._device))


# Blocks of many tensors.

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
        self.rows = np.stack([before[:-1], numbers, first, blocks, size, length, source, target], axis=1)  # of FIELDS

    def part(self, chosen: Sequence[int]) -> BlockTable:
        """Return the table of some runs, by their numbers."""
        return BlockTable([self.runs[one] for one in chosen])

    @cached_property
    def singles(self) -> list[BlockTable]:
        """Return a table of each run alone."""
        return [BlockTable([run]) for run in self.runs]

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
        words = np.empty(self.rows.size + len(keys), dtype=np.int64)
        rows = words[: self.rows.size].reshape(self.rows.shape)
        rows[:] = self.rows
        for field, addresses in ((_SOURCE, sources), (_TARGET, targets)):
            if addresses is not None:
                rows[:, field] = addresses
        words[self.rows.size :] = np.array(keys, dtype=np.uint64).view(np.int64)
        return send(words, torch.empty(len(words), dtype=torch.int64, device=device))
