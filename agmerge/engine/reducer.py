"""Exchange the gradients of one optimizer as its backward passes make them, from step to step."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

import merging as planning
from agmerge.backends import status
from agmerge.backends import torch as torch_backend
from agmerge.engine.grad_hooks import GradientHooks, HandedOver
from agmerge.engine.grad_scaler import LossScale
from agmerge.engine.replicas import compare_replicas
from agmerge.errors import (
    DISTRIBUTED_DATA_PARALLEL,
    NO_GRADIENT,
    NO_SYNC_LATE,
    NOT_COMBINED,
    OTHER_SHARDS,
    SYNCHRONIZE,
    TOO_MANY,
    TWICE,
    AGMergeError,
)
from agmerge.exchanges.message.format import Flag
from agmerge.metrics.running_times import RunningStepTimes
from agmerge.options import momentum
from agmerge.options.config import Config, check_two_level
from agmerge.planning.replanner import Replanner
from agmerge.runtime import process_sets, workers
from agmerge.step.agreed_state import Plans
from agmerge.step.gradient_exchange import Combined, GradientExchange
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.tensors.parameters import ParameterTable
from agmerge.version import __version__


class Reducer:
    """Count backward passes, hand gradients over, attach the combined ones, and guard against calls out of turn.

    ``members``: the parameters of the optimizer that is wrapped. Hooks on them call :meth:`on_gradient`.
    """

    remedy = SYNCHRONIZE  # for a script that changes gradients

    def __init__(self, members: ParameterTable, config: Config) -> None:
        check_two_level(config)
        config.check_patterns(members.name_of(parameter) for parameter in members.name_all())
        self.members, self.passes = members, config.passes
        self.synchronized = False  # gradients are combined, step() has not been called
        self.skipped = False  # ... and come to nothing: the inner optimizer must not step
        self.flags_of_all = 0  # what all ranks said together in the last exchange, see Flag
        self.scaling = LossScale(None)
        self._flag = Flag.ACTIVE  # what this rank says in its messages; JOINED in join()
        self._paused = False  # in no_sync()
        self._fired: dict[str, int] = {}  # backward passes since the last step
        self._handed_over = HandedOver()
        self._compared = False  # replicas, after the first step among these workers
        self._lock = threading.RLock()  # autograd runs the hooks of each device on a thread of its own
        me = weakref.ref(self)  # an optimizer that was dropped must not live on in its own exchange

        def on_agreement(buffers: MergeBuffers, times: RunningStepTimes) -> Plans | None:
            reducer = me()
            return None if reducer is None else reducer._on_agreement(buffers, times)

        self.exchange = GradientExchange(members, config, on_agreement, workers.current)
        self._hooks = GradientHooks(self)
        self._hooks.attach((member.parameter for member in self.exchange.members()), members)

    @property
    def config(self) -> Config:
        """Return the config for the next agreement."""
        return self.exchange.config

    # -- the group of workers -----------------------------------------------------------------------------------

    def connect(self) -> None:
        """Collective. Join the workers that there are now, if this has not happened, and shake hands (G1).

        The group is another one after ``shutdown()`` and ``init()``, and after a reset of an elastic Horovod: what is
        kept is then fitted to the number of its workers.
        """
        exchange, world = self.exchange, workers.world()
        if exchange.world is not None and exchange.world is not world:
            self.leave()
        if exchange.comm is not None or exchange.outside:
            return
        shard_before = exchange.shard
        facts = [("library version", __version__), *exchange.facts()]  # refuses before anything is sent
        workers.listen()
        comm = process_sets.communicator(world, self.config.process_set, self.config.timeout)
        exchange.connect(world, comm, facts)
        if comm is None:
            self._hooks.remove()
            return
        weakref.finalize(self, comm.drop)  # an optimizer that was dropped holds no threads and no connections
        averaged = torch_backend.averaged(self.members.name_all()) if comm.rank == 0 else ""
        if averaged:
            warnings.warn(DISTRIBUTED_DATA_PARALLEL.format(name=averaged), stacklevel=4)
        if not exchange.fit_to_group(shard_before):
            warnings.warn(OTHER_SHARDS, stacklevel=4)

    def leave(self) -> None:
        """Forget the group of workers; the next step connects to the one that there is then."""
        self.exchange.leave()
        self._compared = False

    def _on_agreement(self, buffers: MergeBuffers, times: RunningStepTimes) -> Plans:
        """Watch the parameters that take part now, and plan by what their exchange takes."""
        self._hooks.attach(buffers.parameters, self.members)
        return Replanner(buffers, times)

    def reconfigure(self, config: Config, what: str, advice: str) -> None:
        """Collective. Go on with another config from the next step on, residuals and plan as they are.

        ``what``: the call of the script, and ``advice`` for it, where ranks differ. Raises between ``backward()`` and
        ``step()``.
        """
        self.check_idle(what)
        check_two_level(config)
        if config.partial is not None:
            config = replace(config, partial=self.config.partial)  # what has a residual by now stays sparse
        self.exchange.reconfigure(config, what, advice)
        self.discard()

    # -- backward -------------------------------------------------------------------------------------------------

    def on_gradient(self, parameter: torch.Tensor, name: str) -> None:
        """Collective. Take a gradient that was accumulated once more; send it after the last pass. The hook calls this.

        Called for every tensor: keep it short.
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
                self._fired.setdefault(name, 0)  # a step has begun: what it has so far belongs in a checkpoint
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
        gradient = self._gradient(parameter)
        held = self.exchange.ready(name, gradient)
        if held is not gradient:
            parameter.grad = held
        self._handed_over.add(name, parameter)

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return what this rank has for a parameter, strided and without a loss scale; None while it has joined."""
        if self._flag == Flag.JOINED:
            return None
        gradient = parameter.grad
        if gradient is not None and gradient.layout != torch.strided:
            with self.exchange.breaking():  # the others do not hear of it
                gradient = self.members.make_dense(parameter, self.config.sparse_as_dense)
        return gradient if self.scaling.scaler is None else self.scaling.divided(parameter, gradient)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count no backward pass inside, and send nothing: gradients only accumulate locally."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Tell the other ranks inside that this one has no batches left, and sends only what it has kept."""
        self._flag = Flag.JOINED
        try:
            yield
        finally:
            self._flag = Flag.ACTIVE

    # -- step -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def synchronize(self) -> None:
        """Collective. Send what is left, receive, and make every ``p.grad`` the combined update.

        Connects first, if need be. Raises the same error on every rank for gradients that are not finite, as
        ``nonfinite=`` has it, and on this rank for gradients that the script has changed since they were handed over.
        """
        self.connect()
        momentum.take_over(self.exchange, self.members)
        with self._lock:
            self.exchange.check_unbroken()
            if self.exchange.outside or self.synchronized:
                return  # nothing new: a backward pass would have begun another round
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
            self.synchronized = True

    def _late(self, name: str) -> torch.Tensor | None:
        """Return the gradient of a parameter that no hook has handed over."""
        assert self.exchange.buffers is not None
        buffers = self.exchange.buffers
        return self._gradient(buffers.parameters[buffers.slot_of[name].index])

    def _attach(self, combined: Combined) -> None:
        """Make the updates the gradients; none may reach the inner optimizer that was not combined (G3)."""
        self._check_attachable(combined)
        for parameter, update in zip(combined.buffers.parameters, combined.updates.values(), strict=True):
            parameter.grad = update
        self.scaling.multiply(combined.buffers.parameters)

    def _check_attachable(self, combined: Combined) -> None:
        """Raise where a parameter has changed during backward; warn once where nobody has used any."""
        buffers = combined.buffers
        for slot, parameter in zip(buffers.layout.slots, buffers.parameters, strict=True):
            if parameter.dtype != slot.lane.dtype or parameter.device != slot.lane.device:
                raise AGMergeError(
                    f"parameter {slot.name!r} changed from {slot.lane.dtype} on {slot.lane.device} to "
                    f"{parameter.dtype} on {parameter.device} between backward() and step(); change it between steps"
                )
        if not any(combined.used) and self._flag == Flag.ACTIVE:
            warnings.warn(NO_GRADIENT, stacklevel=7)
        if self.exchange.changed:
            known = set(buffers.parameters)
            for member in self.exchange.members():
                if member.parameter not in known and member.parameter.grad is not None:
                    raise AGMergeError(
                        f"parameter {member.name!r} was added or unfrozen during backward(), and its gradient was "
                        "not combined; do that between step() and the next backward()"
                    )

    def step(self, wrapper: torch.optim.Optimizer, closure: Callable[[], Any] | None, *, combine: bool) -> Any:
        """Collective. Combine the gradients (unless ``combine`` is False: they are), then step the inner optimizer.

        ``wrapper``: whom a GradScaler knows. ``closure`` runs once, before the gradients are combined. Returns its
        loss, or what the inner step returns.
        """
        self.scaling.check_step(wrapper, closure)
        if closure is not None and not combine:
            raise ValueError("step(closure) inside skip_synchronize(): the closure's gradients would not be combined")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if combine:
            if self.synchronized and not self.scaling.combined:
                warnings.warn(TWICE, stacklevel=3)
            self.synchronize()
        elif not self.synchronized and not self.exchange.outside:
            raise AGMergeError(NOT_COMBINED)
        optimizer = self.members.optimizer
        with momentum.withheld(self.exchange, optimizer):
            inner = None if self.skipped else optimizer.step()
        self.end_step()
        return loss if closure is not None else inner

    def end_step(self) -> None:
        """Collective. Commit: the inner optimizer has stepped. Compare replicas and plan anew, where that is due."""
        if self.exchange.outside or self.skipped:
            self.discard()
            return
        self.exchange.commit()
        status.current().enter("is in its script, before a backward pass", self.exchange.step)
        self.discard()
        self._compare_replicas()
        with self.exchange.breaking():
            self.exchange.replan()

    def _compare_replicas(self) -> None:
        """Collective. Compare parameters after the first step, and every so many (G11)."""
        exchange, every = self.exchange, self.config.check_every
        due = not self._compared or (every and exchange.steps % every == 0)
        if due and not self.flags_of_all & Flag.JOINED:  # who has joined may step otherwise, until all have
            assert exchange.comm is not None
            with exchange.breaking():
                compare_replicas(exchange.comm, self.members, exchange.steps, self.config.timeout)
            self._compared = True

    def combine_for(self, scaler: torch.amp.GradScaler, *, combine: bool) -> None:
        """Collective. Combine the gradients now: ``scaler`` is about to unscale them, and to look for infinities.

        Does nothing for a scaler that is not attached, or where they are combined already.
        """
        if scaler is self.scaling.scaler and not self.synchronized and not self.exchange.outside:
            if not combine:
                raise AGMergeError(NOT_COMBINED)
            self.synchronize()
            self.scaling.mark_combined()

    def attach_scaler(self, scaling: LossScale) -> None:
        """Divide gradients by another loss scale from now on."""
        self.scaling = scaling

    def flush(self) -> None:
        """Apply updates that are left to the next forward. Here there are none: see :class:`DearReducer`."""

    def admit_group(self) -> None:
        """Check the group that the optimizer has just got. Here any may come: see :class:`DearReducer`."""

    # -- plans and measurements -------------------------------------------------------------------------------------

    def measured(self) -> planning.Measurements | None:
        """Return what the plan in use was made from; None if nothing was measured."""
        plans = self.exchange.plans
        return plans.measured if isinstance(plans, Replanner) and self.exchange.agreed else None

    def measure(self) -> planning.Measurements:
        """Collective. Measure costs now, for reports; the plan stays. Raises where there was no step to measure."""
        self.check_idle("measure()")
        plans = self.exchange.plans
        if not isinstance(plans, Replanner) or not self.exchange.agreed or not self.exchange.times.typical():
            raise AGMergeError("measure() needs a step to measure: call it after step()")
        with self.exchange.breaking():
            return plans.measure(self.exchange.step)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def window(self) -> dict[torch.Tensor, int]:
        """Return how many backward passes each parameter has seen in the step that has begun; one that broke is new."""
        if self.synchronized or self.exchange.is_broken:
            return {}
        by_name = {self.members.name_of(parameter): parameter for parameter in self.members.name_all()}
        return {by_name[name]: fired for name, fired in self._fired.items()}

    def count(self, parameter: torch.Tensor, fired: int) -> None:
        """Resume a step: ``parameter`` has seen so many backward passes already; its gradient is there."""
        name = self.members.name_of(parameter)
        self._fired[name] = fired
        if fired == self.passes:
            self._hand_over(parameter, name)

    # -- guards -----------------------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> bool:
        """Tell whether gradients are on their way."""
        return len(self._handed_over) > 0 and not self.synchronized

    def abandon(self) -> bool:
        """Collective. End the exchange of gradients that a refused pass has changed; tell whether none is left then."""
        if self._handed_over.overrun and not self.synchronized:
            try:
                Reducer.synchronize(self)
            except AGMergeError:  # it says what the refused pass has changed
                self.exchange.check_unbroken()
        return not self.unfinished

    def discard(self) -> None:
        """Begin the step anew: gradients that were handed over are forgotten, and nothing of them is kept."""
        self._fired, self._handed_over, self.synchronized, self.skipped = {}, HandedOver(), False, False
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
        """Take the hooks off and give the communicators back."""
        self._hooks.remove()
        self.exchange.close()
