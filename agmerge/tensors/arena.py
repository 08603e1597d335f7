# SPDX-License-Identifier: Apache-2.0
"""Flat buffers of one tensor class: two halves, one update, and the only writer of residuals.

A hook writes ``work = residual + gradient``, in front; what was sent is subtracted; in ``step()`` the halves change
places, so that ``work`` is the next residual. Until then no bit of the residual changes, whatever happens. Where the
memory has a residual, the update has a buffer of its own; until the exchange has ended, it holds this rank's gradients.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from agmerge.tensors.layout import Segment, Slot, TensorClass
from sparsifiers import Memory, Momentum, Rate, native
from sparsifiers.gpu import LargestKey, Momenta, Scratch, TensorTable, compensate, has_kernels
from sparsifiers.memories import NOTHING, SUM, Alongside

# Differences, which are written where they are needed, without a temporary.


class Difference(NamedTuple):
    """``minuend - subtrahend``, of one shape and device, in the first one's dtype, which has every value of both."""

    minuend: torch.Tensor
    subtrahend: torch.Tensor

    def write(self, out: torch.Tensor, notes: native.Noting | None = None) -> bool | None:
        """Write the difference to ``out``, of the minuend's shape and dtype; return whether all is finite, if known.

        ``notes``: record the largest written elements where one pass can do both; else they are forgotten.
        """
        finite = native.difference(out, self.minuend, self.subtrahend, notes)
        if finite is None:
            torch.sub(self.minuend, self.subtrahend, out=out)
            if notes is not None:
                notes.forget()
        return finite

    def tensor(self) -> torch.Tensor:
        """Return the difference as a new tensor, in the strides of the minuend."""
        return self.minuend - self.subtrahend


def as_tensor(gradient: torch.Tensor | Difference | None) -> torch.Tensor | None:
    """Return a gradient as a tensor: a new one of a difference; None stays None."""
    return gradient.tensor() if isinstance(gradient, Difference) else gradient


# Flat memory: how it is taken and returned, views of tensors in it, and two halves that change places.

LINE = 64  # bytes


class Halves:
    """Two flat buffers of ``length`` elements: a step writes the front, and the back is as the last step has left it.

    ``double`` False: both are the same memory, of which nothing is kept. ``slots``: the tensors that lie in it.
    """

    def __init__(
        self, length: int, dtype: torch.dtype, device: torch.device, slots: Sequence[Slot], *, double: bool = True
    ) -> None:
        self.front = zeros(length, dtype, device)
        self.back = zeros(length, dtype, device) if double else self.front
        self.front_of = {slot.index: view(self.front, slot) for slot in slots}  # by slot: views of the tensors
        self.back_of = {slot.index: view(self.back, slot) for slot in slots} if double else self.front_of

    def swap(self) -> None:
        """Exchange front and back."""
        self.front, self.back = self.back, self.front
        self.front_of, self.back_of = self.back_of, self.front_of

    def revert(self, slot: Slot) -> None:
        """Make one tensor in front what it is at the back."""
        self.front_of[slot.index].copy_(self.back_of[slot.index])

    def keep(self, slot: Slot) -> None:
        """Make one tensor at the back what it is in front, before :meth:`swap`."""
        self.back_of[slot.index].copy_(self.front_of[slot.index])


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


DONTNEED = 4  # MADV_DONTNEED of Linux


def give_back(flat: torch.Tensor) -> None:
    """Return the pages of a flat buffer of :func:`zeros` to the system: what was in it is lost. Only on Linux.

    Another buffer in its place would not do: allocators keep freed memory, and fill it with zeros to give it out again.
    """
    if sys.platform == "linux" and flat.device.type == "cpu":
        page = mmap.PAGESIZE
        first = -(-flat.data_ptr() // page) * page
        length = (flat.data_ptr() + flat.nbytes - first) // page * page
        if length > 0:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), DONTNEED)


def view(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
    """Return the tensor of ``slot`` in ``flat``, in its shape and C order: a view."""
    return flat[slot.offset : slot.offset + slot.numel].view(slot.shape)


# Memory of updates, which a script gets as ``p.grad``: who still refers to it when the next step writes there.
#
# As in plain torch, a gradient that a script keeps by reference after ``step()`` and ``zero_grad()`` stays as it is:
# the next updates are written elsewhere. Use counts show that, at some tens of nanoseconds a tensor.

_count_of_storage = getattr(torch._C, "_storage_Use_Count", None)


def references(tensors: Iterable[torch.Tensor]) -> int:
    """Return the largest reference count among ``tensors``, those of the values of a dictionary."""
    return max(map(sys.getrefcount, tensors), default=0)  # in C: for each step and tensor


class HandedOut:
    """Flat memory of the updates of ``slots``, all in ``flat``, and whether others than this object refer to it.

    ``views``: by slot, what a parameter's ``grad`` becomes.
    """

    def __init__(self, flat: torch.Tensor, slots: Sequence[Slot]) -> None:
        # `.data`: each with a version of its own, which shows whether a script has written to it.
        self.views = {slot.index: view(flat, slot).data for slot in slots}
        self._flat = flat
        self._own_aliases = self._aliases()  # of this library, as long as nothing was handed out

    def is_kept(self, parameters: Mapping[int, torch.Tensor]) -> bool:
        """Return whether the script still refers to an update, or to a view or an alias of it.

        ``parameters``: by slot, the script's own. What is still a parameter's ``grad`` does not count, for backward
        passes write to that anyway.
        """
        if self._aliases() > self._own_aliases:
            return True
        if references(self.views.values()) <= UNSHARED:
            return False
        others = {i: one for i, one in self.views.items() if i in parameters and parameters[i].grad is not one}
        return references(others.values()) > UNSHARED + 1  # `others` refers to each, too

    def _aliases(self) -> int:
        """Return how many tensors there are in this memory; 0 where torch does not say so."""
        if _count_of_storage is None:
            return 0
        return int(_count_of_storage(self._flat.untyped_storage()._cdata))


UNSHARED = references({0: torch.empty(0)}.values())  # count of a tensor that only a dictionary refers to


# The arena.

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


def subtract(work: torch.Tensor, indices: torch.Tensor | None, sent: torch.Tensor) -> None:
    """Subtract: ``work -= sent`` at ``indices`` (int32, int64; None: everywhere), in place, for any dtype of ``sent``.

    ``work`` then has exactly what was not sent, rounding included. An index may be repeated with the value 0, as in the
    padding of a message. No temporary of ``work``'s size.
    """
    if indices is None:
        work.sub_(sent)
        return
    sent = sent.to(work.dtype)
    if not native.subtract(work, indices, sent):
        work.index_add_(0, indices, sent, alpha=-1)


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


# add(work, update, residual, gradient, moves) writes work = residual + gradient, and returns whether that is finite; or
# None, with nothing done. `update`: where the tensor's update will be, and where the gradient is copied if it `moves`.
Add = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, bool], "bool | None"]
# inspect(slot, work, finite) returns whether work is known to be bad, of which an earlier check said `finite`.
Inspect = Callable[[Slot, torch.Tensor, "bool | None"], bool]


class Arena:
    """Flat storage of one tensor class: 1-D tensors of ``length`` elements each.

    ``residual`` (None for a memory without one) and ``work`` have the class's storage dtype, and so has the momentum of
    a memory with momentum. ``update`` has the gradient's dtype: a parameter's ``grad`` becomes a view of it. Without a
    residual and with equal dtypes, ``update`` is ``work``. ``size``: the number of workers. ``rate``: returns the
    momentum hyper-parameters of a tensor; None: no momentum is applied here.
    """

    def __init__(
        self,
        tensor_class: TensorClass,
        length: int,
        slots: Sequence[Slot],
        memory: Memory,
        size: int = 1,
        rate: Callable[[Slot], Rate] | None = None,
    ) -> None:
        self.tensor_class, self.memory, self._size = tensor_class, memory, size
        self.slots = slots
        self.rate_of: Callable[[Slot], Rate | None] = rate or (lambda slot: None)
        self.values = Halves(length, tensor_class.storage, tensor_class.device, slots, double=memory.has_residual)
        self.momenta = Halves(length, tensor_class.storage, tensor_class.device, slots) if memory.has_momentum else None
        self._state: dict[str, Halves] = {"residual": self.values} if memory.has_residual else {}  # by kind
        if self.momenta is not None:
            self._state[MOMENTA[not memory.averages]] = self.momenta
        # The momentum of dense tensors is applied to the average: see `settle`.
        self._momentum_of_gradients = memory.has_momentum and not memory.averages
        self.is_sum = memory.one_formula([None]) == SUM  # work is residual + gradient, or the gradient alone
        self.in_place = not memory.has_residual and tensor_class.dtype == tensor_class.storage
        self._moves = memory.has_residual and tensor_class.dtype == tensor_class.storage and not tensor_class.on_device
        self.update = self.values.front if self.in_place else zeros(length, tensor_class.dtype, tensor_class.device)
        self._handed_out = HandedOut(self.update, slots)
        self.gradients: Mapping[int, torch.Tensor] = self._handed_out.views  # where updates are written, by slot

    def let_updates_go(self, parameters: Mapping[int, torch.Tensor]) -> None:
        """Write the next updates elsewhere, if the script still refers to the last ones. Between two rounds.

        ``parameters``: by slot, the script's own; those that are not in it are not looked at.
        """
        if not self._handed_out.is_kept(parameters):
            return
        length, tensor_class = self.update.numel(), self.tensor_class
        if self.in_place:
            self.values = Halves(length, tensor_class.storage, tensor_class.device, self.slots, double=False)
        self.update = self.values.front if self.in_place else zeros(length, tensor_class.dtype, tensor_class.device)
        self._handed_out = HandedOut(self.update, self.slots)
        self.gradients = self._handed_out.views

    def release(self) -> None:
        """Return memory to the system of which nothing is needed after this step: work and updates, no residual."""
        give_back(self.update)
        if not self.memory.has_residual:
            give_back(self.values.front)

    @property
    def work(self) -> torch.Tensor:
        """Residual + gradient, less sent values: the next residual."""
        return self.values.front

    @property
    def residual(self) -> torch.Tensor | None:
        """Accumulated gradients not yet sent, as of the last ``step()``; None for a memory without residual."""
        return self.values.back if self.memory.has_residual else None

    def state_of(self, slot: Slot) -> dict[str, torch.Tensor]:
        """Return one tensor's state between steps: views, by kind: "residual", and one of ``MOMENTA``."""
        return {kind: halves.back_of[slot.index] for kind, halves in self._state.items()}

    def work_of(self, slot: Slot) -> torch.Tensor:
        """Return the tensor's view of ``work``, in its shape."""
        return self.values.front_of[slot.index]

    def drop_nonfinite(self, slot: Slot | None = None) -> None:
        """Set infinities and NaN in the next residual and momentum to 0, of one tensor (``slot``; None: of all)."""
        for halves in self._state.values():
            torch.nan_to_num_(halves.front if slot is None else halves.front_of[slot.index], 0.0, 0.0, 0.0)

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
        work = self.values.front_of[index]
        if isinstance(gradient, Difference):
            if self.in_place:
                return gradient.write(work, alongside.notes)
            gradient.write(self.gradients[index])
            gradient = self.gradients[index]
        residual = self.values.back_of[index] if self.memory.has_residual else None
        if add is not None and self.is_sum and residual is not None and gradient is not None:
            finite = add(work, self.gradients[index], residual, gradient, alongside.copy is not None)
            if finite is not None:
                return finite
        momentum = self._momentum_of(slot, self.momenta) if self.momenta and self._momentum_of_gradients else None
        return self.memory.compensate(work, residual, gradient, momentum, self._size, alongside)

    def accumulate_and_move(
        self, slot: Slot, gradient: torch.Tensor, add: Add | None, notes: native.Noting | None, inspect: Inspect
    ) -> tuple[torch.Tensor, bool]:
        """Do what :meth:`accumulate` and :meth:`move_to_update` do, in one pass if possible, then inspect ``work``.

        Returns what ``p.grad`` should be, and whether ``work`` is bad.
        """
        copy = self.update_for(slot, gradient)
        finite = self.accumulate(slot, gradient, add, Alongside(copy, notes))
        held = self.move_to_update(slot, gradient) if copy is None else copy
        return held, not finite and inspect(slot, self.values.front_of[slot.index], finite)

    def update_for(self, slot: Slot, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return where a gradient is copied while it is accumulated: its update's place; None: it is not copied."""
        update = self.gradients[slot.index]
        return update if self._moves and is_movable(update, gradient) else None

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

    def subtract_sent(
        self, segment: Segment, indices: torch.Tensor | None, sent: torch.Tensor | Unwritten | None
    ) -> None:
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
            subtract(self.work[part], indices, sent)
        if self.momenta is not None and indices is not None and sent is not None:
            self.memory.mask(self.momenta.front[part], indices, sent)

    def add_unsent(self, segment: Segment, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Add ``values`` to ``work`` at ``indices`` (int32 or int64) of ``segment``; momentum is not cleared.

        Does nothing for a memory without residual.
        """
        if self.memory.has_residual:
            subtract(self.work[segment.start : segment.stop], indices, -values)

    def write_and_subtract(self, segment: Segment, write: Write) -> bool:
        """Call ``write``, which writes the sent values of ``segment`` and subtracts them from ``work`` in one pass.

        Returns False, with nothing done, where no loop or kernel implements what the memory does when something is
        sent.
        """
        if self.memory.hands_back or (self._momentum_of_gradients and not self.memory.is_formula):
            return False
        masks = self.momenta is not None and self.memory.formula().masks
        momentum = self.momenta.front[segment.start : segment.stop] if self.momenta and masks else None
        return write(commit=self.memory.has_residual, momentum=momentum)

    def settle(self, used: Sequence[bool], *, waits: bool) -> None:
        """Finish dense tensors, once every message has arrived.

        Memories with momentum of averages apply it to the update. With these, and with ``waits``, a tensor for which
        no rank had a gradient (``used``, by slot) has an update of 0, and its residual and momentum stay as before.
        """
        if self.memory.averages and self.momenta is not None:
            rates = {self.rate_of(slot) for slot in self.slots}
            if len(rates) == 1:
                self.memory.correct(self.update, Momentum(self.momenta.back, self.momenta.front, *rates))
            else:
                for slot in self.slots:
                    self.memory.correct(self.gradients[slot.index], self._momentum_of(slot, self.momenta))
        if self.memory.averages or waits:
            for slot in self.slots:
                if not used[slot.index]:
                    self.gradients[slot.index].zero_()
                    self.revert(slot)

    def revert(self, slot: Slot) -> None:
        """Make residual and momentum of one tensor, at the end of this step, those from before it."""
        for halves in self._state.values():
            halves.revert(slot)

    def keep(self, slot: Slot) -> None:
        """Make residual and momentum of one tensor those of the end of this step, before the other tensors' are."""
        for halves in self._state.values():
            halves.keep(slot)

    @property
    def keeps_state(self) -> bool:
        """Return whether a residual or a momentum is kept from step to step."""
        return bool(self._state)

    def swap(self) -> None:
        """Make ``work`` the residual. Called in ``step()`` and nowhere else."""
        for halves in self._state.values():
            halves.swap()

    def _momentum_of(self, slot: Slot, momenta: Halves) -> Momentum:
        return Momentum(momenta.back_of[slot.index], momenta.front_of[slot.index], self.rate_of(slot))


# Several tensors of one class at once: in few launches on a device, in few calls on the host.

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
