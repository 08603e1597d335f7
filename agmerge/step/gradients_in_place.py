# SPDX-License-Identifier: Apache-2.0
"""Gradients that are sent from where they lie, and overwritten by updates: no memory of a model's size is needed."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable

import torch

from agmerge.tensors.layout import Slot


class GradientsInPlace:
    """Gradients of one round that lie in no arena, and where their updates are written."""

    def __init__(self) -> None:
        self._slots: frozenset[int] = frozenset()
        self._updates: dict[int, torch.Tensor] = {}  # by slot
        self._strided: dict[int, torch.Tensor] = {}  # by slot: gradients of plain memory that are not in C order
        # By device: addresses where gradients begin that updates will be written over, ascending, and where they end.
        self._taken: dict[torch.device, tuple[list[int], list[int]]] = {}

    def choose(self, slots: Iterable[int]) -> None:
        """Send the tensors with these numbers so, from now on. Nothing may be under way."""
        self._slots = frozenset(slots)
        self.let_go()

    def __contains__(self, index: int) -> bool:
        return index in self._slots

    def hold(self, slot: Slot, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Return the tensor to be sent, in its shape and contiguous; None: this rank has no gradient.

        The update will be written over the gradient itself, if that is contiguous, of the tensor's dtype and shares its
        memory with no other gradient; else into a new tensor. Called once a round for each tensor.
        """
        if gradient is None:
            return None
        if gradient.dtype == slot.tensor_class.dtype and gradient.shape == slot.shape and not gradient.requires_grad:
            if self._takes(gradient):
                if gradient.is_contiguous():
                    self._updates[slot.index] = gradient
                    return gradient
                self._strided[slot.index] = gradient
        return gradient.detach().to(slot.tensor_class.dtype).reshape(slot.shape).contiguous()

    def _takes(self, gradient: torch.Tensor) -> bool:
        """Return whether no other gradient here shares memory with this one, and record where it lies.

        autograd gives one tensor to two parameters where the gradient of a sum needs no other, perhaps on some ranks
        alone.
        """
        begins, ends = self._taken.setdefault(gradient.device, ([], []))
        span = gradient.numel()
        if not gradient.is_contiguous():
            span = 1 + sum(step * (size - 1) for step, size in zip(gradient.stride(), gradient.shape, strict=True))
        first = gradient.data_ptr()
        last, place = first + span * gradient.element_size(), bisect(begins, first)
        if (place and ends[place - 1] > first) or (place < len(begins) and begins[place] < last):
            return False
        begins.insert(place, first)
        ends.insert(place, last)
        return True

    def of(self, slot: Slot) -> torch.Tensor:
        """Return where the update of a tensor is written, in its shape and contiguous; zeros where nothing was."""
        update = self._updates.get(slot.index)
        if update is None:
            update = torch.zeros(slot.shape, dtype=slot.tensor_class.dtype, device=slot.tensor_class.device)
            self._updates[slot.index] = update
        return update

    def strided(self, slot: Slot, stride: tuple[int, ...]) -> torch.Tensor | None:
        """Return this rank's own gradient, for the update to be copied to, if it has these strides; else None."""
        gradient = self._strided.get(slot.index)
        return gradient if gradient is not None and gradient.stride() == stride else None

    def let_go(self) -> None:
        """Drop the references to gradients: updates have been handed out, or the round comes to nothing."""
        self._updates, self._strided, self._taken = {}, {}, {}
