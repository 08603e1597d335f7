# SPDX-License-Identifier: Apache-2.0
"""Accumulation of several tensors of one class at once: in few launches on a device, in few calls on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agmerge.tensors.arena import Arena
from agmerge.tensors.layout import Slot
from sparsifiers.gpu import LargestKey, Momenta, Scratch, TensorTable, compensate, has_kernels

Gradients = Sequence[tuple[Slot, "torch.Tensor | None"]]  # of tensors of one class; None: the tensor has none


def table_of(slots: Sequence[Slot]) -> TensorTable:
    """Return the begins and lengths of adjacent tensors, in elements from the first one on."""
    offsets = [slot.offset - slots[0].offset for slot in slots]
    return TensorTable(offsets, [slot.numel for slot in slots], slots[0].tensor_class.device)


def accumulate_together(
    arena: Arena, gradients: Gradients, table: TensorTable, largest: LargestKey, scratch: Scratch | None
) -> torch.Tensor:
    """Accumulate adjacent tensors on a device in few launches, else as :meth:`Arena.accumulate` does.

    ``table``: the tensors, as :func:`table_of` returns them. ``largest``: takes the largest magnitude of the merge
    buffer on the device. ``scratch``: of their slice of ``work``, if a sparsifier selects from it directly. Returns
    their largest magnitude, 0-dim.
    """
    slots = [slot for slot, _ in gradients]
    part = slice(min(slot.offset for slot in slots), max(slot.end for slot in slots))
    work = arena.work[part]
    if scratch is not None:
        scratch.forget()
    formula = arena.memory.one_formula(map(arena.rate_of, slots)) if has_kernels(work) else None
    alike = all(gradient is None or gradient.dtype == arena.tensor_class.dtype for _, gradient in gradients)
    if formula is not None and formula.has_kernel and alike:
        rows = [None if gradient is None else gradient.contiguous() for _, gradient in gradients]
        residual, momenta = None if arena.residual is None else arena.residual[part], None
        if formula.rate is not None and arena.momenta is not None:
            momenta = Momenta(arena.momenta.back[part], arena.momenta.front[part], *formula.rate)
        compensate(table, rows, residual, work, largest=largest, scratch=scratch, momenta=momenta)
        return largest.magnitude
    if arena.is_sum:
        add_up(arena, gradients)
    else:
        for slot, gradient in gradients:
            arena.accumulate(slot, gradient)
    magnitude: torch.Tensor = torch.linalg.vector_norm(work, torch.inf)
    return magnitude


def add_up(arena: Arena, gradients: Gradients) -> None:
    """Write ``work`` of several tensors where :attr:`Arena.is_sum`: the gradient, plus the residual if there is one."""
    given = [(arena.work_of(slot), gradient) for slot, gradient in gradients if gradient is not None]
    missing = [arena.work_of(slot) for slot, gradient in gradients if gradient is None]
    if given:
        torch._foreach_copy_([view for view, _ in given], [gradient for _, gradient in given])
    if missing:
        torch._foreach_zero_(missing)
    if arena.memory.has_residual:
        pairs = [(arena.values.front_of[slot.index], arena.values.back_of[slot.index]) for slot, _ in gradients]
        torch._foreach_add_([work for work, _ in pairs], [residual for _, residual in pairs])
