"""The memory of one lane: two slabs, one update, and the only writer of residuals.

A hook writes ``work = residual + gradient``; a commit takes off what was sent; in ``step()`` the slabs
change places, so that ``work`` is the next residual. Until then the residual is untouched, to the bit,
whatever happens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from agmerge.layout import Lane, Segment, Slot
from sparsifiers import Memory, Momentum, Rate, kernel


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

    ``residual`` (None for a memory that keeps nothing) and ``work`` have the lane's storage dtype, and so has the
    momentum of a memory that has one; ``update`` has the gradient's own: a parameter's ``grad`` becomes a view of it.
    ``size``: the number of workers. ``rate``: what the optimizer says of a tensor's momentum; None: nothing.
    """

    def __init__(
        self,
        lane: Lane,
        length: int,
        slots: Sequence[Slot],
        memory: Memory,
        size: int = 1,
        rate: Callable[[Slot], Rate] | None = None,
    ) -> None:
        self.lane, self.memory, self._size = lane, memory, size
        self._slots, self._rate = slots, rate

        def slab() -> torch.Tensor:
            return torch.zeros(length, dtype=lane.storage, device=lane.device)

        first = slab()
        self._slabs = [first, slab() if memory.keeps else first]
        self._momenta = [slab(), slab()] if memory.corrects else []
        self._views = [{slot.index: view(one, slot) for slot in slots} for one in self._slabs]
        self._momentum_views = [{slot.index: view(one, slot) for slot in slots} for one in self._momenta]
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

    @property
    def momentum(self) -> torch.Tensor:
        """The momentum as of the last ``step()``, of a memory that has one."""
        return self._momenta[1 - self._turn]

    def residual_of(self, slot: Slot) -> torch.Tensor | None:
        """The residual of one tensor, in its shape: a view."""
        return self._views[1 - self._turn][slot.index] if self.memory.keeps else None

    def state_of(self, slot: Slot) -> dict[str, torch.Tensor]:
        """What is kept of one tensor from step to step: views, by kind."""
        found = {}
        if self.memory.keeps:
            found["residual"] = self._views[1 - self._turn][slot.index]
        if self.memory.corrects:
            found["momentum"] = self._momentum_views[1 - self._turn][slot.index]
        return found

    def work_of(self, slot: Slot) -> torch.Tensor:
        """The tensor's part of ``work``, in its shape: a view."""
        return self._views[self._turn][slot.index]

    def clean(self, slot: Slot | None = None) -> None:
        """Make zero what is not finite of the next residual and momentum (of one tensor; None: of all)."""
        kept = [self._slabs[self._turn]] if slot is None else [self._views[self._turn][slot.index]]
        if self.memory.corrects:
            momenta = self._momenta[self._turn]
            kept.append(momenta if slot is None else self._momentum_views[self._turn][slot.index])
        for tensor in kept:
            torch.nan_to_num_(tensor, 0.0, 0.0, 0.0)

    def compensate(self, slot: Slot, gradient: torch.Tensor | None) -> bool | None:
        """Write the tensor's part of ``work`` from its residual and ``gradient`` (None: it has none).

        Returns whether all of it is finite, if the memory knows, else None.
        """
        # The momentum of what is sent whole takes the average: see `correct`.
        momentum = self._momentum_of(slot) if self.memory.corrects and self.memory.keeps else None
        return self.memory.compensate(self.work_of(slot), self.residual_of(slot), gradient, momentum, self._size)

    def commit(self, segment: Segment, indices: torch.Tensor | None, sent: torch.Tensor) -> None:
        """Take off what was sent of ``segment``; nothing to do for a memory that keeps nothing."""
        part = slice(segment.start, segment.stop)
        if self.memory.keeps:
            commit(self.work[part], indices, sent)
            if self.memory.corrects and indices is not None:
                self.memory.mask(self._momenta[self._turn][part], indices, sent)

    def correct(self) -> None:
        """Every message has arrived: apply the momentum of what is sent whole to its average."""
        if self.memory.corrects and not self.memory.keeps:
            rates = {self._rate(slot) for slot in self._slots} if self._rate is not None else {None}
            if len(rates) == 1:
                before, after = self._momenta[1 - self._turn], self._momenta[self._turn]
                self.memory.correct(self.update, Momentum(before, after, *rates))
                return
            for slot in self._slots:
                self.memory.correct(self.gradients[slot.index], self._momentum_of(slot))

    def swap(self) -> None:
        """Make what is left in ``work`` the residual. Called in ``step()`` and nowhere else."""
        self._turn = 1 - self._turn

    def _momentum_of(self, slot: Slot) -> Momentum:
        before, after = (self._momentum_views[turn][slot.index] for turn in (1 - self._turn, self._turn))
        return Momentum(before, after, None if self._rate is None else self._rate(slot))


def view(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
    """The tensor of ``slot`` in ``flat``, in C order."""
    return flat[slot.offset : slot.offset + slot.numel].view(slot.shape)
