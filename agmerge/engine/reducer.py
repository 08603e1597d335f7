"""Reducer of the gradients of one optimizer, as its backward passes make them, from step to step."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from agmerge.backends import status
from agmerge.engine.clipping_watch import ClippingWatch
from agmerge.engine.gathered import DenseTable, GatheredGradients, gathered_of, takes_sparse_alone
from agmerge.engine.grad_hooks import GradientHooks, HandedOver
from agmerge.engine.synchronizer import Synchronizer
from agmerge.engine.withheld_momentum import take_over, withheld
from agmerge.errors import (
    NO_GRADIENT,
    NO_SYNC_LATE,
    NOT_COMBINED,
    SYNCHRONIZE,
    TOO_MANY,
    TWICE,
    AGMergeError,
    NonFiniteError,
    and_more,
    shortened,
)
from agmerge.exchanges.message.format import Flag
from agmerge.metrics.running_times import RunningStepTimes
from agmerge.runtime import workers
from agmerge.step.agreed_state import Plans
from agmerge.step.config import Config
from agmerge.step.gradient_exchange import Combined
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.tensors.dtensors import Gradients, gradient_of
from agmerge.tensors.parameters import ParameterTable, optimizers_of

GAVE_UP = "has called zero_grad() in the middle of a step, when gradients of {missing} had not come{cause}"
AFTER_BROKEN = (
    "Save what you need and start again. If every rank is still there, call optimizer.reset() on each of them, which "
    "gives this step up"
)


class Reducer(Synchronizer):
    """Reducer of gradients: it counts backward passes, hands gradients over, and attaches the combined ones.

    ``members``: the parameters of the wrapped optimizer. Hooks on them call :meth:`on_gradient`.
    """

    combines_gradients = True
    remedy = SYNCHRONIZE  # for a script that changes gradients

    def __init__(self, members: ParameterTable, config: Config) -> None:
        gathered = bool(gathered_of(members))
        if config.sync.sparse_as_dense and all(map(takes_sparse_alone, optimizers_of(members.optimizer))):
            raise ValueError("sparse_as_dense=True: SparseAdam takes sparse gradients alone; leave it out")
        super().__init__(members, DenseTable(members) if gathered else members, config)
        self._gathered = GatheredGradients(members) if gathered else None
        self.skipped = False  # gradients are combined, and come to nothing: the inner optimizer must not step
        self.idle = False  # this worker is alone, and no parameter needs a gradient: there is nothing to combine
        self._paused = False  # in no_sync()
        self._closed = False
        self._combines = True  # in step(); False in skip_synchronize(), where they are combined already
        self._fired: dict[str, int] = {}  # backward passes since the last step
        self._handed_over = HandedOver()
        self._gradients = Gradients()  # as of the last agreement
        self._lock = threading.RLock()  # autograd runs the hooks of each device on a thread of its own
        self._clipping = ClippingWatch(self.exchange)
        self._hooks = GradientHooks(self)
        alone = workers.is_initialized() and workers.size() == 1 and not workers.elastic()
        self._hooks.attach((member.parameter for member in self.exchange.members()), members, alone=alone)

    def _stay_outside(self) -> None:
        self._hooks.remove()

    def _on_agreement(self, buffers: MergeBuffers, times: RunningStepTimes) -> Plans | None:
        """Hook the parameters that take part now, and return a planner of their exchange."""
        self._gradients = Gradients()
        self._hooks.attach(buffers.flat.parameters, self.members, alone=self.alone)
        return super()._on_agreement(buffers, times)

    # -- backward -------------------------------------------------------------------------------------------------

    def on_gradient(self, parameter: torch.Tensor, name: str) -> None:
        """Collective. Count a gradient that was accumulated once more; send it after the last pass. Called by the hook.

        It runs for every tensor: keep it short.
        """
        with self._lock:
            if self.synchronized:
                self.discard()  # synchronize() without step(): the update is discarded
            if not self._fired:
                status.current().enter("is in a backward pass", self.exchange.step)
            if self._paused:
                if name in self._handed_over:
                    self._handed_over.refuse_more()
                    raise AssertionError(f"{NO_SYNC_LATE} Parameter: {name!r}.")
                self._fired.setdefault(name, 0)  # a step has begun: its gradients so far belong in a checkpoint
                return
            fired = self._fired.get(name, 0) + 1
            if fired != self.passes:
                self.exchange.check_unbroken()
            if fired > self.passes:
                self._handed_over.refuse_more()
                raise AssertionError(TOO_MANY.format(name, fired, self.passes))
            self._fired[name] = fired
            if fired == self.passes:
                self._hand_over(parameter, name)

    def _hand_over(self, parameter: torch.Tensor, name: str) -> None:
        gradient = self._gradient(parameter, name)
        held = self.exchange.ready(name, gradient)
        if held is not gradient:
            self._gradients.set(parameter, held)
        self._handed_over.add(name, parameter, own=held is not gradient)

    def _gradient(self, parameter: torch.Tensor, name: str) -> torch.Tensor | None:
        """Return this rank's gradient of a parameter, strided and without a loss scale; None while it has joined."""
        if self._flag == Flag.JOINED:
            return None
        gradient = parameter.grad
        if hasattr(gradient, "to_local"):  # a DTensor; asked here, for a call a tensor would cost more
            gradient = gradient_of(parameter, name)
        if gradient is not None and gradient.layout != torch.strided:
            with self.exchange.breaking():  # the others do not hear of it
                gradient = self.members.make_dense(parameter, self.config.sync.sparse_as_dense)
        return gradient if self.scaling.scaler is None else self.scaling.divided(parameter, gradient)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count no backward pass inside, and send nothing: gradients only accumulate locally."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    # -- step -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def synchronize(self) -> None:
        """Collective. Send the remaining messages, receive, and make every ``p.grad`` the combined update.

        Connects first, if need be. Raises on every rank for gradients that are not finite, according to ``nonfinite=``,
        and on this rank where the script has changed gradients after they were handed over.
        """
        self.connect()
        take_over(self.exchange, self.members, self.members.optimizer)
        with self._lock:
            self.exchange.check_unbroken()
            if self.exchange.outside or self.synchronized:
                return  # nothing new: a backward pass would have begun another round
            self.idle = (self.alone or self._gathered is not None) and not self._trains()
            if self.idle:
                self._gather()
                self.synchronized = self._gathered is not None
                return
            status.current().enter("is in step()", self.exchange.step)
            changed = self._handed_over.error(self.members, self.exchange.steps, self.remedy)
            try:
                combined = self.exchange.finish(self._late, self._flag)
            except BaseException:
                if not self.exchange.is_broken:  # all ranks are at the same place, and go on with the next step
                    self.discard()
                raise
            self.flags_of_all, self.skipped = combined.flags, combined.skipped
            with self.exchange.breaking():
                self._attach(combined)
            if changed is not None:
                self.discard()
                raise changed
            if not self.skipped:
                self._gather()
            self.synchronized = True

    def _gather(self) -> None:
        """Collective. Combine gathered sparse gradients, if there are any. Raises as :meth:`synchronize` does."""
        comm = self.exchange.comm
        if self._gathered is None or comm is None:
            return
        joined = self._flag == Flag.JOINED
        try:
            self.skipped = not self._gathered.combine(comm, self.config, self.exchange.totals, joined=joined)
        except NonFiniteError:  # the same on all ranks
            self.discard()
            raise
        except BaseException as error:
            with self.exchange.breaking():
                raise error

    def _trains(self) -> bool:
        """Return whether a parameter needs a gradient, or the exchange has known one that did."""
        exchange = self.exchange
        return (exchange.agreed and not exchange.changed) or bool(exchange.members())

    def _late(self, name: str) -> torch.Tensor | None:
        """Return the gradient of a parameter that no hook has handed over."""
        assert self.exchange.buffers is not None
        buffers = self.exchange.buffers
        slot = buffers.slot_of[name]
        parameter = buffers.flat.parameters[slot.index]
        gradient = self._gradient(parameter, name)
        if gradient is not None and buffers.flat.will_overwrite(slot, gradient):
            # The last update, made zero by zero_grad(): sums may be written there, and the round be repeated.
            gradient = gradient.clone()
            self._gradients.set(parameter, gradient)
        return gradient

    def _attach(self, combined: Combined) -> None:
        """Make the updates the gradients; none may reach the inner optimizer that was not combined (G3)."""
        self._check_attachable(combined)
        self._clipping.note(combined)
        set_gradient = self._gradients.set
        for parameter, update in zip(combined.buffers.flat.parameters, combined.updates.values(), strict=True):
            set_gradient(parameter, update)
        self.scaling.multiply(p.grad for p in combined.buffers.flat.parameters if p.grad is not None)

    def _check_attachable(self, combined: Combined) -> None:
        """Raise where a parameter has changed during backward; warn once where no rank has a gradient."""
        buffers = combined.buffers
        for slot, parameter in zip(buffers.layout.slots, buffers.flat.parameters, strict=True):
            if parameter.dtype != slot.lane.dtype or parameter.device != slot.lane.device:
                raise AGMergeError(
                    f"parameter {slot.name!r} changed from {slot.lane.dtype} on {slot.lane.device} to "
                    f"{parameter.dtype} on {parameter.device} between backward() and step(); change it between steps"
                )
        if not any(combined.used) and self._flag == Flag.ACTIVE:
            warnings.warn(NO_GRADIENT, stacklevel=7)
        if self.exchange.changed:
            known = set(buffers.flat.parameters)
            for member in self.exchange.members():
                if member.parameter not in known and member.parameter.grad is not None:
                    raise AGMergeError(
                        f"parameter {member.name!r} was added or unfrozen during backward(), and its gradient was "
                        "not combined; do that between step() and the next backward()"
                    )

    @contextmanager
    def taking_combined(self, what: str) -> Iterator[None]:
        """Make steps inside use the gradients as they are: they are combined already.

        ``what``: the call, for errors.
        """
        before, self._combines = self._combines, False
        try:
            yield
        finally:
            self._combines = before

    def step(self, wrapper: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> Any:
        """Collective. Combine the gradients, unless they are combined already, and step the inner optimizer.

        ``wrapper``: the optimizer that a GradScaler was given. ``closure`` runs once, before the gradients are
        combined. Returns its loss, or the result of the inner step.
        """
        self.scaling.check_step(wrapper, closure)
        if closure is not None and not self._combines:
            raise ValueError("step(closure) inside skip_synchronize(): the closure's gradients would not be combined")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._combines:
            if self.synchronized and not self.scaling.combined:
                warnings.warn(TWICE, stacklevel=3)
            self.synchronize()
        elif not self.synchronized and not self.exchange.outside and not self.idle:
            raise AGMergeError(NOT_COMBINED)
        optimizer = self.members.optimizer
        with withheld(self.exchange, optimizer), self._clipping.looking(optimizer):
            inner = None if self.skipped else optimizer.step()
        self.end_step()
        return loss if closure is not None else inner

    def end_step(self) -> None:
        """Collective. Commit: the inner optimizer has stepped. Compare replicas and plan again, where that is due."""
        if self.exchange.outside or self.skipped or self.idle:
            self.discard()
            return
        self.exchange.commit()
        self.discard()
        self.end_exchange()

    def _compare_replicas(self) -> None:
        if not self.flags_of_all & Flag.JOINED:  # a rank that has joined may step otherwise, until all have
            super()._compare_replicas()

    def combine_for(self, scaler: torch.amp.GradScaler) -> None:
        """Collective. Combine the gradients now: ``scaler`` is about to unscale them, and to look for infinities.

        Does nothing for a scaler that is not attached, or where they are combined already.
        """
        if scaler is self.scaling.scaler and not self.synchronized and not self.exchange.outside:
            if not self._combines:
                raise AGMergeError(NOT_COMBINED)
            self.synchronize()
            self.scaling.mark_combined()

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def window(self) -> dict[torch.Tensor, int]:
        """Return how many backward passes each parameter has seen in this step; none after a broken exchange."""
        if self.synchronized or self.exchange.is_broken:
            return {}
        by_name = {self.members.name_of(parameter): parameter for parameter in self.members.name_all()}
        return {by_name[name]: fired for name, fired in self._fired.items()}

    def count(self, parameter: torch.Tensor, fired: int) -> None:
        """Resume a step: ``parameter`` has seen ``fired`` backward passes already; its gradient is in ``p.grad``."""
        name = self.members.name_of(parameter)
        self._fired[name] = fired
        if fired == self.passes:
            self._hand_over(parameter, name)

    # -- guards -----------------------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> bool:
        """Return whether gradients are on their way."""
        return len(self._handed_over) > 0 and not self.synchronized

    def abandon(self) -> bool:
        """Collective. Drop the gradients that are on their way, where possible; return whether none is left then.

        A lone worker can at any time. With others it is possible while a gradient is missing, as after an exception in
        a backward pass: then the step comes to nothing on all ranks, and the others raise
        :class:`agmerge.AGMergeError`. Gradients that a refused pass has changed are dropped likewise. Raises here after
        an error that has broken the exchange.
        """
        if self.synchronized:
            return True
        if self.alone:
            if self.exchange.is_broken and self.config.sync.model is not None:
                self._raise_broken()  # updates of the last step may be lost
            if self.exchange.is_broken and not self._closed:
                self.leave()  # a lone worker: no other rank is affected
            self.discard()
        elif self.exchange.is_broken:
            self._raise_broken()
        elif missing := [m.name for m in self.exchange.members() if m.name not in self._handed_over]:
            if self.exchange.under_way:  # else nothing has left, and this rank begins the step again
                self.exchange.give_up(GAVE_UP.format(missing=and_more(missing), cause=_surviving()))
            self.discard()
        elif self._handed_over.overrun:
            try:
                Reducer.synchronize(self)
            except AGMergeError:  # its text names the gradients that the refused pass has changed
                self.exchange.check_unbroken()
        return not self.unfinished

    def begin_anew(self) -> None:
        if self.synchronized:
            self.discard()  # else, without a backward pass in its next step, a rank would not exchange anything
        self._fired = {}  # the gradients of these passes are gone

    def _raise_broken(self) -> None:
        """Raise the error that has broken the exchange, with advice."""
        try:
            self.exchange.check_unbroken()
        except AGMergeError as error:
            raise AGMergeError(f"{error}. {AFTER_BROKEN}") from error.__cause__

    def discard(self) -> None:
        """Discard the step: handed-over gradients are forgotten, and residuals stay as before it."""
        self._fired, self._handed_over, self.synchronized, self.skipped = {}, HandedOver(), False, False
        self.idle = False
        self.scaling.clear()
        self.exchange.discard()

    def check_idle(self, what: str) -> None:
        """Raise unless ``what`` may happen now: no backward pass waits for its ``synchronize()``."""
        if any(self._fired.values()) and not self.synchronized:
            raise AGMergeError(f"{what} was called between backward() and step(); call it after step()")

    def set_passes(self, passes: int) -> None:
        """Sum ``passes`` backward passes from the next step on."""
        self.check_idle("set_backward_passes_per_step()")
        self.passes = passes

    def close(self) -> None:
        """Remove the hooks and close the communicators."""
        self._closed, self._fired, self._handed_over = True, {}, HandedOver()
        self._hooks.remove()
        self.exchange.close()


def _surviving() -> str:
    """Return the error that is being handled, in brackets for the end of a sentence; empty: there is none."""
    error = sys.exc_info()[1]
    return "" if error is None else f" ({type(error).__name__}: {shortened(str(error))})"
