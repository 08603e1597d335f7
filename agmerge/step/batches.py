# SPDX-License-Identifier: Apache-2.0
"""Accumulation of small tensors, and of all on devices, merge buffer by merge buffer: one call each would cost more."""

from __future__ import annotations

import torch

from agmerge.step.merge_buffers import MergeBuffers
from agmerge.tensors.accumulation import accumulate_together, add_up
from agmerge.tensors.arena import Arena
from agmerge.tensors.layout import Slot
from agmerge.tensors.nonfinite import NonFiniteGuard, is_finite

Batch = list[tuple[Slot, "torch.Tensor | None"]]  # tensors of one class, with their gradients


class Batches:
    """Gradients of a round that wait until their merge buffer is complete, to be accumulated together."""

    def __init__(self, buffers: MergeBuffers, guard: NonFiniteGuard) -> None:
        self._buffers, self._guard = buffers, guard
        self._waiting: dict[int, dict[Arena, Batch]] = {}  # by merge buffer and arena: not yet in `work`
        self._read: list[torch.Tensor] = []  # gradients on devices, which are perhaps still to be read

    def hold(self, slot: Slot, gradient: torch.Tensor | None) -> None:
        """Keep a gradient until :meth:`accumulate` is called for its merge buffer; None: the tensor has none."""
        batches = self._waiting.setdefault(self._buffers.buffer_of[slot.index], {})
        batches.setdefault(self._buffers.flat.arena_of[slot.index], []).append((slot, gradient))

    def accumulate(self, buffer: int) -> None:
        """Write ``work = residual + gradient`` for all waiting tensors of a merge buffer, class by class."""
        batches = self._waiting.pop(buffer, {})
        for device in {arena.tensor_class.device for arena in batches if arena.tensor_class.on_device}:
            self._buffers.kernels.largest(buffer, device).begin()
        for arena, batch in batches.items():
            if arena.tensor_class.on_device:
                self._accumulate_on_device(buffer, arena, batch)
            else:
                self._copy(arena, batch)

    def let_go(self) -> None:
        """Drop references to gradients: work queued from now on runs after the kernels that have read them."""
        self._read.clear()

    def _accumulate_on_device(self, buffer: int, arena: Arena, batch: Batch) -> None:
        """Accumulate the tensors of a merge buffer that lie in ``arena``: few launches, one check for infinities."""
        batch.sort(key=lambda one: one[0].offset)
        # A residual is this rank's own to the end of the round, and so is a gradient; a sum over ranks is not.
        kept = arena.memory.has_residual
        parts = [
            (slot.name, arena.work_of(slot) if kept else gradient) for slot, gradient in batch if gradient is not None
        ]
        self._read += [gradient for _, gradient in batch if gradient is not None]
        kernels, tensor_class = self._buffers.kernels, arena.tensor_class
        table, scratch = kernels.table([slot for slot, _ in batch]), kernels.scratch_of(buffer, tensor_class)
        largest = accumulate_together(arena, batch, table, kernels.largest(buffer, tensor_class.device), scratch)
        self._guard.note(largest, parts)
        if self._buffers.budgets.energy is not None and arena.tensor_class.sparse:
            for slot, gradient in batch:
                self._buffers.budgets.energy.add(slot, gradient)

    def _copy(self, arena: Arena, batch: Batch) -> None:
        """Copy all small dense tensors of a merge buffer into ``arena``, in one call with one check for infinities."""
        add_up(arena, batch)
        start, stop = min([slot.offset for slot, _ in batch]), max([slot.end for slot, _ in batch])
        # Elements between them are of the same merge buffer, and finite, or padding.
        if is_finite(arena.work[start:stop]):
            return
        for slot, _ in batch:
            if self._guard.inspect(slot, arena.work_of(slot)):
                arena.accumulate(slot, None)
