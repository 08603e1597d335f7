"""Flat buffers of one tensor class (lane): two slabs, one update, and the only writer of residuals.

A hook writes ``work = residual + gradient``; a commit subtracts what was sent; in ``step()`` the slabs change places,
so that ``work`` is the next residual. Until then no bit of the residual changes, whatever happens. Where the memory has
a residual, the update has a slab of its own; until the exchange has ended, it holds this rank's gradients.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from agmerge.tensors.difference import Difference
from agmerge.tensors.layout import Lane, Segment, Slot
from sparsifiers import Memory, Momentum, Rate, kernel_message
from sparsifiers.compensation import NOTHING, SUM, Alongside
from sparsifiers.gpu import LargestKey, Momenta, Scratch, TensorTable, compensate, has_kernels

LINE = 64  # bytes
MOMENTA = ("averaged_momentum", "momentum")  # kinds of state: equal on all ranks, and of this rank's own gradients


class Unwritten(Protocol):
    """Values sent of all elements of a segment, in a form that is not written out as a tensor."""

    def take_off(self, work: torch.Tensor) -> None:
        """Subtract the values from ``work``, 1-D, in place; padding behind them is not touched."""

    def tensor(self) -> torch.Tensor:
        """Return the values as a new tensor, in any shape, without padding."""


class Write(Protocol):
    """Writer of a segment's selection into its message, which also subtracts it from ``work``, in one pass."""

    def __call__(self, *, commit: bool, momentum: torch.Tensor | None) -> bool:
        """Return whether the selection was written; False: nothing was done.

        ``commit``: also subtract what is written from ``work``. ``momentum``, as long as the segment: is set to 0 where
        the subtracted value is not 0; None: no momentum is cleared.
        """


def commit(work: torch.Tensor, indices: torch.Tensor | None, sent: torch.Tensor) -> None:
    """Subtract: ``work -= sent`` at ``indices`` (int32, int64; None: everywhere), in place, for any dtype of ``sent``.

    ``work`` then has exactly what was not sent, rounding included. An index may be repeated with the value 0, as in the
    padding of a message. No temporary of ``work``'s size.
    """
    if indices is None:
        work.sub_(sent)
        return
    sent = sent.to(work.dtype)
    if not kernel_message.commit(work, indices, sent):
        work.index_add_(0, indices, sent, alpha=-1)


def zeros(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a 1-D tensor of zeros on a cache line's boundary. On the host, pages take memory once written to.

    ``torch.zeros`` would write all of it at once, while all gradients of the first step are still in memory.
    """
    if device.type != "cpu":
        return torch.zeros(length, dtype=dtype, device=device)
    size = length * dtype.itemsize
    raw = torch.from_numpy(np.zeros(size + LINE, dtype=np.uint8))  # of calloc's
    start = -raw.data_ptr() % LINE
    return raw[start : start + size].view(dtype)


def trim() -> None:
    """Return freed memory to the system. Does nothing where the C library is not glibc.

    glibc keeps freed memory between two allocations that are in use: as much as all gradients, after a step that has
    copied them one by one to where their updates will be.
    """
    if sys.platform == "linux":
        give = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if give is not None:
            give(ctypes.c_size_t(0))


def is_movable(update: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Return whether a gradient may move to ``update``: it is elsewhere, and a plain copy of its elements moves it."""
    alike = gradient.dtype == update.dtype and gradient.shape == update.shape
    plain = type(gradient) is type(update) and alike and gradient.is_contiguous()
    return plain and not gradient.requires_grad and gradient.data_ptr() != update.data_ptr()


def move_to_update(update: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Copy an accumulated gradient to ``update``, where its update will be written, and return ``update``.

    The gradient's own memory is then free for later gradients of the same backward pass. Returns the gradient itself
    where :func:`is_movable` is False.
    """
    return update.copy_(gradient) if is_movable(update, gradient) else gradient


# add(work, update, residual, gradient) writes work = residual + gradient, and returns whether that is finite; or None,
# with nothing done. `update`: where the tensor's update will be.
Add = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], "bool | None"]


class Arena:
    """Flat storage of one tensor class: 1-D tensors of ``length`` elements each.

    ``residual`` (None for a memory without one) and ``work`` have the class's storage dtype, and so has the momentum of
    a memory with momentum. ``update`` has the gradient's dtype: a parameter's ``grad`` becomes a view of it. Without a
    residual and with equal dtypes, ``update`` is ``work``. ``size``: the number of workers. ``rate``: returns the
    momentum hyper-parameters of a tensor; None: no momentum is applied here.
    """

    work: torch.Tensor  # residual + gradient, less committed values

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
        self._slots = slots
        self._rate_of: Callable[[Slot], Rate | None] = rate or (lambda slot: None)

        def slab() -> torch.Tensor:
            return zeros(length, lane.storage, lane.device)

        first = slab()
        self._slabs = [first, slab() if memory.has_residual else first]
        self._momenta = [slab(), slab()] if memory.has_momentum else []
        self._views = [{slot.index: view(flat, slot) for slot in slots} for flat in self._slabs]
        self._momentum_views = [{slot.index: view(flat, slot) for slot in slots} for flat in self._momenta]
        # The momentum of dense tensors is applied to the average: see `settle`.
        self.is_sum = memory.one_formula([None]) == SUM  # work is residual + gradient, or the gradient alone
        self._momentum_of_gradients = memory.has_momentum and not memory.averages
        self._tables: dict[tuple[int, ...], TensorTable] = {}  # of tensors that are accumulated together, by index
        self.in_place = not memory.has_residual and lane.dtype == lane.storage
        self._moves = memory.has_residual and lane.dtype == lane.storage and not lane.on_device
        self.update = first if self.in_place else zeros(length, lane.dtype, lane.device)
        # `.data`: each with a version of its own, which shows whether a script has written to it.
        self.gradients = {slot.index: view(self.update, slot).data for slot in slots}
        self._turn = 1
        self.swap()

    @property
    def residual(self) -> torch.Tensor | None:
        """Return accumulated gradients not yet sent, as of the last ``step()``; None for a memory without residual."""
        return self._slabs[1 - self._turn] if self.memory.has_residual else None

    @property
    def momentum(self) -> torch.Tensor:
        """Return the momentum as of the last ``step()``, of a memory with momentum."""
        return self._momenta[1 - self._turn]

    def residual_of(self, slot: Slot) -> torch.Tensor | None:
        """Return the residual of one tensor, in its shape: a view; None for a memory without residual."""
        return self._views[1 - self._turn][slot.index] if self.memory.has_residual else None

    def state_of(self, slot: Slot) -> dict[str, torch.Tensor]:
        """Return one tensor's state between steps: views, by kind: "residual", and one of ``MOMENTA``."""
        state = {}
        if self.memory.has_residual:
            state["residual"] = self._views[1 - self._turn][slot.index]
        if self.memory.has_momentum:
            state[MOMENTA[not self.memory.averages]] = self._momentum_views[1 - self._turn][slot.index]
        return state

    def work_of(self, slot: Slot) -> torch.Tensor:
        """Return the tensor's view of ``work``, in its shape."""
        return self._views[self._turn][slot.index]

    def drop_nonfinite(self, slot: Slot | None = None) -> None:
        """Set infinities and NaN in the next residual and momentum to 0, of one tensor (``slot``; None: of all)."""
        kept = []
        if self.memory.has_residual:
            kept.append(self.work if slot is None else self._views[self._turn][slot.index])
        if self.memory.has_momentum:
            momenta = self._momenta[self._turn]
            kept.append(momenta if slot is None else self._momentum_views[self._turn][slot.index])
        for tensor in kept:
            torch.nan_to_num_(tensor, 0.0, 0.0, 0.0)

    def accumulate(
        self,
        slot: Slot,
        gradient: torch.Tensor | Difference | None,
        add: Add | None = None,
        alongside: Alongside = NOTHING,
    ) -> bool | None:
        """Write the tensor's view of ``work`` from its residual and ``gradient`` (None: it has none).

        Returns whether all of ``work`` is finite, if that is known, else None. ``add``: is tried first where ``work``
        is a plain sum; it may do further work in the same pass. ``alongside``: is done in the same pass if possible;
        the gradient is copied to the result of :meth:`update_for`, and nowhere else.
        """
        index = slot.index
        work = self._views[self._turn][index]
        if isinstance(gradient, Difference):
            if self.in_place:
                return gradient.write(work, alongside.notes)
            gradient.write(self.gradients[index])
            gradient = self.gradients[index]
        residual = self._views[1 - self._turn][index] if self.memory.has_residual else None
        if add is not None and self.is_sum and residual is not None and gradient is not None:
            finite = add(work, self.gradients[index], residual, gradient)
            if finite is not None:
                return finite
        momentum = self._momentum_of(slot) if self._momentum_of_gradients else None
        return self.memory.compensate(work, residual, gradient, momentum, self._size, alongside)

    def update_for(self, slot: Slot, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return where a gradient is copied while it is accumulated: its update's place; None: it is not copied."""
        update = self.gradients[slot.index]
        return update if self._moves and is_movable(update, gradient) else None

    def accumulate_all(
        self, gradients: Sequence[tuple[Slot, torch.Tensor | None]], largest: LargestKey, scratch: Scratch | None
    ) -> torch.Tensor:
        """Accumulate all tensors of one merge buffer on a device in few launches, else as :meth:`accumulate` does.

        The tensors lie side by side. ``largest``: takes the largest magnitude of the merge buffer on the device.
        ``scratch``: of the tensors' slice of ``work``, if a sparsifier selects from it directly. Returns their largest
        magnitude, 0-dim.
        """
        slots = [slot for slot, _ in gradients]
        part = slice(min(slot.offset for slot in slots), max(slot.end for slot in slots))
        work = self.work[part]
        if scratch is not None:
            scratch.forget()
        formula = self.memory.one_formula(map(self._rate_of, slots)) if has_kernels(work) else None
        alike = all(gradient is None or gradient.dtype == self.lane.dtype for _, gradient in gradients)
        if formula is not None and formula.has_kernel and alike:
            rows = [None if gradient is None else gradient.contiguous() for _, gradient in gradients]
            residual, momenta = None if self.residual is None else self.residual[part], None
            if formula.rate is not None:
                momenta = Momenta(self.momentum[part], self._momenta[self._turn][part], *formula.rate)
            compensate(self._table(slots), rows, residual, work, largest=largest, scratch=scratch, momenta=momenta)
            return largest.magnitude
        if self.is_sum:
            self.add_up(gradients)
        else:
            for slot, gradient in gradients:
                self.accumulate(slot, gradient)
        magnitude: torch.Tensor = torch.linalg.vector_norm(work, torch.inf)
        return magnitude

    def add_up(self, gradients: Sequence[tuple[Slot, torch.Tensor | None]]) -> None:
        """Write ``work`` for several tensors at once, where :attr:`is_sum`: gradient, plus residual if there is one."""
        views = self._views[self._turn]
        given = [(views[slot.index], gradient) for slot, gradient in gradients if gradient is not None]
        missing = [views[slot.index] for slot, gradient in gradients if gradient is None]
        if given:
            torch._foreach_copy_([view for view, _ in given], [gradient for _, gradient in given])
        if missing:
            torch._foreach_zero_(missing)
        if self.memory.has_residual:
            before = self._views[1 - self._turn]
            pairs = [(views[slot.index], before[slot.index]) for slot, _ in gradients]
            torch._foreach_add_([work for work, _ in pairs], [residual for _, residual in pairs])

    def _table(self, slots: Sequence[Slot]) -> TensorTable:
        """Return the begins and ends of adjacent tensors, in elements from the first one on. Kept for later steps."""
        key = tuple(slot.index for slot in slots)
        if key not in self._tables:
            offsets = [slot.offset - slots[0].offset for slot in slots]
            self._tables[key] = TensorTable(offsets, [slot.numel for slot in slots], self.lane.device)
        return self._tables[key]

    def move_to_update(self, slot: Slot, gradient: torch.Tensor) -> torch.Tensor:
        """Return what ``p.grad`` should be until the exchange has ended: its copy at the update's place, or itself.

        On a device nothing moves, for that would be a launch a tensor. A gradient that lies in the last update is
        cloned.
        """
        update = self.gradients[slot.index]
        if not self.in_place and update.device.type == "cpu":
            return move_to_update(update, gradient)
        # A gradient accumulated into the last update: the sum over the ranks is about to be written there, on a
        # device before it is known whether the round will be repeated.
        return gradient.clone() if gradient.data_ptr() == update.data_ptr() else gradient

    def commit(self, segment: Segment, indices: torch.Tensor | None, sent: torch.Tensor | Unwritten | None) -> None:
        """Subtract the sent values of ``segment`` from ``work``. Does nothing for a memory without residual.

        ``indices``: int32 or int64 within the segment; None: all of it. ``sent``: the values; None: exactly those of
        ``work``. Values that are not written out (:class:`Unwritten`) cover all of the segment.
        """
        if not self.memory.has_residual:
            return
        part = slice(segment.start, segment.stop)
        if sent is None:
            self.work[part].zero_()
        elif not isinstance(sent, torch.Tensor):
            sent.take_off(self.work[part])
            return
        else:
            commit(self.work[part], indices, sent)
        if self.memory.has_momentum and indices is not None and sent is not None:
            self.memory.mask(self._momenta[self._turn][part], indices, sent)

    def retain(self, segment: Segment, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Add ``values`` to ``work`` at ``indices`` (int32 or int64) of ``segment``; momentum is not cleared.

        Does nothing for a memory without residual.
        """
        if self.memory.has_residual:
            commit(self.work[segment.start : segment.stop], indices, -values)

    def take(self, segment: Segment, write: Write) -> bool:
        """Call ``write``, which writes the sent values of ``segment`` and subtracts them from ``work`` in one pass.

        Returns False, with nothing done, where no loop or kernel implements what the memory does when something is
        sent.
        """
        if self.memory.hands_back or (self._momentum_of_gradients and not self.memory.is_formula):
            return False
        masks = self.memory.formula().masks
        momentum = self._momenta[self._turn][segment.start : segment.stop] if masks else None
        return write(commit=self.memory.has_residual, momentum=momentum)

    def settle(self, used: Sequence[bool], *, waits: bool) -> None:
        """Finish dense tensors, once every message has arrived.

        Memories with momentum of averages apply it to the update. With these, and with ``waits``, a tensor for which
        no rank had a gradient (``used``, by slot) has an update of 0, and its residual and momentum stay as before.
        """
        if self.memory.averages:
            rates = {self._rate_of(slot) for slot in self._slots}
            if len(rates) == 1:
                before, after = self._momenta[1 - self._turn], self._momenta[self._turn]
                self.memory.correct(self.update, Momentum(before, after, *rates))
            else:
                for slot in self._slots:
                    self.memory.correct(self.gradients[slot.index], self._momentum_of(slot))
        if self.memory.averages or waits:
            for slot in self._slots:
                if not used[slot.index]:
                    self.gradients[slot.index].zero_()
                    self.keep(slot)

    def keep(self, slot: Slot) -> None:
        """Make residual and momentum of one tensor, at the end of this step, those from before it."""
        if self.memory.has_residual:
            self._views[self._turn][slot.index].copy_(self._views[1 - self._turn][slot.index])
        if self.memory.has_momentum:
            momentum = self._momentum_of(slot)
            momentum.after.copy_(momentum.before)

    def swap(self) -> None:
        """Make ``work`` the residual. Called in ``step()`` and nowhere else."""
        self._turn = 1 - self._turn
        self.work = self._slabs[self._turn]

    def _momentum_of(self, slot: Slot) -> Momentum:
        before, after = self._momentum_views[1 - self._turn], self._momentum_views[self._turn]
        return Momentum(before[slot.index], after[slot.index], self._rate_of(slot))


def view(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
    """Return the tensor of ``slot`` in ``flat``, in its shape and C order: a view."""
    return flat[slot.offset : slot.offset + slot.numel].view(slot.shape)
