# SPDX-License-Identifier: Apache-2.0
"""Flat buffers of one tensor class (tensor class): two halves, one update, and the only writer of residuals.

A hook writes ``work = residual + gradient``, in front; what was sent is subtracted; in ``step()`` the halves change
places, so that ``work`` is the next residual. Until then no bit of the residual changes, whatever happens. Where the
memory has a residual, the update has a buffer of its own; until the exchange has ended, it holds this rank's gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from agmerge.tensors.difference import Difference
from agmerge.tensors.flat_memory import Halves, zeros
from agmerge.tensors.handed_out import HandedOut
from agmerge.tensors.layout import Segment, Slot, TensorClass
from sparsifiers import Memory, Momentum, Rate, kernel_message
from sparsifiers.compensation import NOTHING, SUM, Alongside

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
    if not kernel_message.subtract(work, indices, sent):
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
        self._slots = slots
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

    @property
    def gradients(self) -> dict[int, torch.Tensor]:
        """Where the update of each tensor is written, by slot: views, in the shape of the tensor."""
        return self._handed_out.views

    def let_updates_go(self, parameters: Mapping[int, torch.Tensor]) -> None:
        """Write the next updates elsewhere, if the script still refers to the last ones. Between two rounds.

        ``parameters``: by slot, the script's own; those that are not in it are not looked at.
        """
        if not self._handed_out.is_kept(parameters):
            return
        length, tensor_class = self.update.numel(), self.tensor_class
        if self.in_place:
            self.values = Halves(length, tensor_class.storage, tensor_class.device, self._slots, double=False)
        self.update = self.values.front if self.in_place else zeros(length, tensor_class.dtype, tensor_class.device)
        self._handed_out = HandedOut(self.update, self._slots)

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
            finite = add(work, self.gradients[index], residual, gradient)
            if finite is not None:
                return finite
        momentum = self._momentum_of(slot, self.momenta) if self.momenta and self._momentum_of_gradients else None
        return self.memory.compensate(work, residual, gradient, momentum, self._size, alongside)

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
            rates = {self.rate_of(slot) for slot in self._slots}
            if len(rates) == 1:
                self.memory.correct(self.update, Momentum(self.momenta.back, self.momenta.front, *rates))
            else:
                for slot in self._slots:
                    self.memory.correct(self.gradients[slot.index], self._momentum_of(slot, self.momenta))
        if self.memory.averages or waits:
            for slot in self._slots:
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
