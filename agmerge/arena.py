"""The memory of one lane: two slabs, one update, and the only writer of residuals.

A hook writes ``work = residual + gradient``; a commit takes off what was sent; in ``step()`` the slabs
change places, so that ``work`` is the next residual. Until then the residual is untouched, to the bit,
whatever happens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agmerge.layout import Lane, Segment, Slot
from sparsifiers import Memory, kernel


def commit(work: torch.Tensor, indices: torch.Tensor | None, sent: torch.Tensor) -> None:
    """``work -= sent`` at ``indices`` (int32, int64; None: everywhere), in place, for any dtype of ``sent``.

    What stays is exactly what was not sent, rounding included. An index may occur again with 0: the padding
    of a message does no harm. No temporary of ``work``'s size.
    """
    if indices is None:
        work.sub_(sent)
        return
    sent = sent.to(work.dtype)
    if not kernel.commit(work, indices, sent):
        work.index_add_(0, indices, sent, alpha=-1)


class Arena:
    """Flat storage of one lane, 1-D of ``length`` elements each.

    ``residual`` (None for a memory that keeps nothing) and ``work`` have the lane's storage dtype,
    ``update`` the gradient's own: a parameter's ``grad`` becomes a view of it.
    """

    def __init__(self, lane: Lane, length: int, slots: Sequence[Slot], memory: Memory) -> None:
        self.lane, self.memory = lane, memory
        count = 2 if memory.keeps else 1
        self._slabs = [torch.zeros(length, dtype=lane.storage, device=lane.device) for _ in range(count)]
        self._views = [{slot.index: view(slab, slot) for slot in slots} for slab in self._slabs]
        self._turn = 0
        self.update = torch.zeros(length, dtype=lane.dtype, device=lane.device)
        self.gradients = {slot.index: view(self.update, slot) for slot in slots}

    @property
    def work(self) -> torch.Tensor:
        """``residual + gradient``, less what is committed."""
        return self._slabs[self._turn]

    @property
    def residual(self) -> torch.Tensor | None:
        """What was accumulated and not sent, as of the last ``step()``."""
        return self._slabs[1 - self._turn] if self.memory.keeps else None

    def residual_of(self, slot: Slot) -> torch.Tensor | None:
        """The residual of one tensor, in its shape: a view."""
        return self._views[1 - self._turn][slot.index] if self.memory.keeps else None

    def compensate(self, slot: Slot, gradient: torch.Tensor | None) -> None:
        """Write the tensor's part of ``work`` from its residual and ``gradient`` (None: it has none)."""
        self.memory.compensate(self._views[self._turn][slot.index], self.residual_of(slot), gradient)

    def commit(self, segment: Segment, indices: torch.Tensor | None, sent: torch.Tensor) -> None:
        """Take off what was sent of ``segment``; nothing to do for a memory that keeps nothing."""
        if self.memory.keeps:
            commit(self.work[segment.start : segment.stop], indices, sent)

    def swap(self) -> None:
        """Make what is left in ``work`` the residual. Called in ``step()`` and nowhere else."""
        if self.memory.keeps:
            self._turn = 1 - self._turn


def view(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
    """The tensor of ``slot`` in ``flat``, in C order."""
    return flat[slot.offset : slot.offset + slot.numel].view(slot.shape)
