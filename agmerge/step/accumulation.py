# SPDX-License-Identifier: Apache-2.0
"""Accumulation of a round: gradients are added to residuals, and what they make complete is prepared or selected."""

from __future__ import annotations

import torch

from agmerge.step.merge_buffers import MergeBuffers
from agmerge.tensors.arena import Add, Arena, Difference, accumulate_together, add_up, as_tensor
from agmerge.tensors.layout import Segment, Slot
from agmerge.tensors.nonfinite import NonFiniteGuard, is_finite
from sparsifiers import Kind, Selection, Sparsifier
from sparsifiers.memories import Alongside

# Batches, because one call each would cost too much for small tensors, and for all on devices.

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


class Accumulation:
    """Gradients of one round on their way into flat buffers and, where that can begin, into messages.

    ``guard`` is told of gradients that are not finite.
    """

    def __init__(self, buffers: MergeBuffers, step: int, guard: NonFiniteGuard) -> None:
        self._buffers, self._step, self._guard = buffers, step, guard
        self._batches = Batches(buffers, guard)
        # By merge buffer: tensors on devices that are prepared from where their gradients lie, which may still be read.
        self._in_place: dict[int, list[tuple[Slot, torch.Tensor]]] = {}
        self._selections: dict[int, Selection] = {}  # by slot, of tensors that are selected from before merging
        self._is_prepared: set[int] = set()  # slots that were prepared while they were accumulated
        self._has_moved: set[int] = set()  # slots with a gradient that moved to its update's place meanwhile

    def add(self, slot: Slot, gradient: torch.Tensor | Difference | None, moves: bool) -> None:
        """Write ``work = residual + gradient``, without gradients that are not finite; later for those in batches.

        The round then comes to nothing; figures, sparsifiers and codecs must not see infinities. ``moves``: the
        gradient may move to its update's place meanwhile, see :meth:`moved`.
        """
        if slot.index in self._buffers.flat.in_place:
            self._prepare_in_place(slot, gradient)
            return
        if slot.index in self._buffers.batched and (gradient is not None or slot.tensor_class.on_device):
            self._batches.hold(slot, as_tensor(gradient))
            return
        arena, notes = self._buffers.flat.arena_of[slot.index], self._buffers.kernels.notes(slot)
        copy = arena.update_for(slot, gradient) if moves and isinstance(gradient, torch.Tensor) else None
        finite = arena.accumulate(slot, gradient, self._fused(slot, copy is not None), Alongside(copy, notes))
        if copy is not None:
            self._has_moved.add(slot.index)
        if gradient is None:
            return
        if not finite and self._guard.inspect(slot, arena.work_of(slot), finite):
            arena.accumulate(slot, None, alongside=Alongside(notes=notes))
        elif self._buffers.budgets.energy is not None and slot.tensor_class.sparse:
            self._buffers.budgets.energy.add(slot, as_tensor(gradient))

    def _prepare_in_place(self, slot: Slot, gradient: torch.Tensor | Difference | None) -> None:
        """Prepare a tensor from where its gradient lies: its class has no residual."""
        values = self._buffers.flat.in_place.hold(slot, as_tensor(gradient))
        exchange = self._buffers.prepared[slot.index]
        finite = exchange.prepare(slot, values, self._step)
        self._is_prepared.add(slot.index)
        if values is None or finite:
            return
        if slot.tensor_class.on_device:
            self._in_place.setdefault(self._buffers.buffer_of[slot.index], []).append((slot, values))
        else:
            self._guard.inspect(slot, values, finite)

    def _fused(self, slot: Slot, moves: bool) -> Add | None:
        """Return a function that accumulates a tensor and prepares it in the same pass; None: there is none.

        It also moves the gradient, if that ``moves``.
        """
        exchange = self._buffers.prepared.get(slot.index)
        if exchange is None:
            return None

        def add(
            work: torch.Tensor, update: torch.Tensor, residual: torch.Tensor, gradient: torch.Tensor
        ) -> bool | None:
            finite = exchange.add_and_prepare(slot, work, update, residual, gradient, moves=moves)
            if finite:
                self._is_prepared.add(slot.index)
            return finite

        return add

    def moved(self, slot: Slot, gradient: torch.Tensor) -> torch.Tensor:
        """Return the tensor to use in a gradient's place: its copy where the update will be, or itself."""
        arena = self._buffers.flat.arena_of[slot.index]
        return arena.gradients[slot.index] if slot.index in self._has_moved else arena.move_to_update(slot, gradient)

    def prepare(self, slot: Slot) -> None:
        """Begin a tensor's message before the other tensors of its merge buffer are ready: select, or prepare."""
        segment = self._buffers.presparsified.get(slot.index)
        if segment is not None and slot.index not in self._buffers.batched:
            self._selections[slot.index] = self._select(segment)
        exchange = self._buffers.prepared.get(slot.index)
        if exchange is not None and slot.index not in self._is_prepared:
            exchange.prepare(slot, self._buffers.flat.arena_of[slot.index].work_of(slot), self._step)

    def complete(self, buffer: int) -> None:
        """Accumulate and prepare the tensors of a merge buffer that have waited for each other."""
        self._batches.accumulate(buffer)
        for message in self._buffers.messages[buffer]:
            magnitude = message.exchange.complete(message.name, self._step)
            inside = {slot.index for slot in message.slots} if buffer in self._in_place else set()
            given = [one for one in self._in_place.get(buffer, ()) if one[0].index in inside]
            if magnitude is not None and given:
                self._guard.note(magnitude, [(slot.name, values) for slot, values in given])
            for slot, values in given if magnitude is None else ():
                self._guard.inspect(slot, values)

    def selection(self, segment: Segment) -> Selection:
        """Return the selection of a segment, made ahead or now."""
        return self._selections.pop(segment.slots[0].index, None) or self._select(segment)

    def _select(self, segment: Segment) -> Selection:
        work, k, shapes = self._buffers.vector(segment, self._step)
        scratch = self._buffers.kernels.scratch(segment)
        return self._sparsifier().select(work, k=k, key=segment.key, step=self._step, shapes=shapes, scratch=scratch)

    def empty_selection(self, segment: Segment) -> Selection:
        """Return a selection of nothing, which has the capacity of the segment's own."""
        work, k, shapes = self._buffers.vector(segment, self._step)
        capacity = self._sparsifier().capacity(work.numel(), k=k, step=self._step, shapes=shapes)
        return Selection(torch.zeros(capacity, dtype=torch.int32, device=work.device), 0)

    def _sparsifier(self) -> Sparsifier:
        sparsifier = self._buffers.config.compression.compressor.part(Kind.SPARSE)
        assert isinstance(sparsifier, Sparsifier)  # the tensor class is a sparse one
        return sparsifier

    def let_go(self) -> None:
        """Drop references to gradients: work queued from now on runs after the kernels that have read them."""
        self._batches.let_go()
        self._in_place.clear()
