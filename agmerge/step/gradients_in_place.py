"""Send gradients from where they lie, and write updates there: no memory of a model's size is needed."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from agmerge.tensors.layout import Slot


class GradientsInPlace:
    """The gradients of one round that lie in no arena, and where their updates are written.

    ``slots``: the numbers of the tensors that are sent so.
    """

    def __init__(self, slots: Iterable[int] = ()) -> None:
        self._slots = frozenset(slots)
        self._updates: dict[int, torch.Tensor] = {}  # by slot

    def __contains__(self, index: int) -> bool:
        return index in self._slots

    def hold(self, slot: Slot, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Return what is sent of a tensor, in its shape and contiguous; None: this rank has no gradient.

        The update will be written over the gradient itself, if that is contiguous and of the tensor's dtype, else into
        a tensor of its own.
        """
        self._updates.pop(slot.index, None)
        if gradient is None:
            return None
        plain = gradient.is_contiguous() and gradient.dtype == slot.lane.dtype and not gradient.requires_grad
        if plain and gradient.shape == slot.shape:
            self._updates[slot.index] = gradient
            return gradient
        return gradient.detach().to(slot.lane.dtype).reshape(slot.shape).contiguous()

    def of(self, slot: Slot) -> torch.Tensor:
        """Return where the update of a tensor is written, in its shape and contiguous; zeros where nothing was."""
        update = self._updates.get(slot.index)
        if update is None:
            update = torch.zeros(slot.shape, dtype=slot.lane.dtype, device=slot.lane.device)
            self._updates[slot.index] = update
        return update

    def let_go(self) -> None:
        """Hold on to no gradient: the round has ended."""
        self._updates.clear()
