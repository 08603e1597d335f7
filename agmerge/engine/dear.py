# SPDX-License-Identifier: Apache-2.0
"""DeAR: reduce-scatters under backward, all-gathers and updates under the next forward.

Zhang et al., "DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce Pipelining", ICDCS 2023. Every
collective starts in backward or in ``step()``, in the order of the plan; the hooks of forward only wait, so ranks may
run their modules in any order. Grouping is the planner's. The paper tunes it by Bayesian optimisation of the step time;
here the planner predicts it from the measurements of the first steps.
"""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.optim import optimizer as optimizers

import merging
from agmerge.engine.grad_scaler import gathered_of
from agmerge.engine.reducer import Reducer, check_attachable
from agmerge.errors import AGMergeError
from agmerge.exchanges import InFlight
from agmerge.exchanges.message.format import Flag
from agmerge.metrics.running_times import KEEP, RunningStepTimes
from agmerge.metrics.step_times import Clock, Seconds
from agmerge.planning.cost_probe import MeasuredCosts, gather_seconds
from agmerge.planning.measuring import Look, Measurer, SeenMessages
from agmerge.planning.replanner import Replanner
from agmerge.script import seen_steps
from agmerge.script.module_hooks import ModuleHooks, Parameters, check_readers
from agmerge.step.agreed_state import Plans
from agmerge.step.config import Config
from agmerge.step.gradient_exchange import Combined
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.tensors.parameters import ParameterTable, gradient_dtype

# Times of forward passes, and plans made from them.


class ForwardTimed(Protocol):
    """Interface of the :class:`agmerge.engine.dear.DearReducer` that is planned for, which imports this file."""

    def flush(self) -> None:
        """Collective. Apply every pending update."""

    def forward_seconds(self) -> Seconds:
        """Return the seconds of forward of each tensor, (n,), as measured on this rank."""


class DearMeasurer(Measurer):
    """Measurer for mode ``"dear"``: backward, forward and exchanges. ``reducer`` is held weakly."""

    def __init__(self, buffers: MergeBuffers, times: RunningStepTimes, reducer: ForwardTimed) -> None:
        super().__init__(buffers, times)
        self._reducer = weakref.proxy(reducer)

    def measure(
        self, step: int, look: Look | None = None, *, at_once: bool = False
    ) -> merging.Pieces[merging.Measurements]:
        """Collective. Measure. Pending updates are applied first: nothing is in flight while exchanges are timed."""
        parts = super().measure(step, look, at_once=at_once)
        while True:
            self._reducer.flush()
            try:
                yield next(parts)
            except StopIteration as end:
                measured: merging.Measurements = end.value
                return measured

    def seen(self, step: int, look: Look) -> SeenMessages | None:
        """Return None: messages in backward are only one half of each exchange."""
        return None

    def with_costs(self, step: int, ready: Seconds, costs: MeasuredCosts) -> merging.Measurements:
        """Collective. Return the measurements for planning, with seconds of forward."""
        (forward,) = gather_seconds(self.buffers, self._reducer.forward_seconds())
        measured = super().with_costs(step, ready, costs)
        profile = measured.profile
        with_forward = merging.Profile(**{**profile.plain(), "forward": forward.max(axis=0)})
        return replace(measured, profile=with_forward, modes=("dear",))


class Visit(NamedTuple):
    """Marks of one run of a module's forward; only the clock can read a mark."""

    reader: int  # the module's number
    reached: Any  # mark of the moment when its forward was about to begin
    received: Any  # mark of the moment when its messages had arrived


class ForwardTimes:
    """Durations of the forward of each reader: up to the next reader's, for the last one up to the first gradient.

    A reader is a module that reads parameters by itself. The update of its parameters counts as its forward, waiting
    for messages does not.
    """

    def __init__(self, clock: Clock, readers: Sequence[Parameters]) -> None:
        self._clock, self._readers = clock, readers
        self.open = False  # between a step and the first gradient after it
        self._visits: list[Visit] = []  # of the pass under way
        self._ended: tuple[list[Visit], Any] | None = None  # a pass that is over and not read, with the mark of its end
        self._passes: list[Seconds] = []  # the last ones, seconds by reader

    def begin(self) -> None:
        """Begin to measure the next forward pass: a step has ended."""
        self._visits, self.open = [], True

    def mark(self) -> Any:
        """Return a mark of now; None outside a measured forward pass."""
        return self._clock.mark() if self.open else None

    def reached(self, reader: int, mark: Any) -> None:
        """Record that a reader, reached at ``mark``, has its messages now."""
        if self.open and mark is not None:
            self._visits.append(Visit(reader, mark, self._clock.mark()))

    def end(self) -> None:
        """End the pass: the first gradient is ready.

        Marks are read one pass later, when every device has reached them.
        """
        if self.open:
            self._read_marks()
            self.open, self._ended = False, (self._visits, self._clock.mark())

    def of(self, parameters: Iterable[torch.Tensor]) -> Seconds:
        """Return the seconds of forward for each of ``parameters``, (n,): medians, a reader's divided equally."""
        self._read_marks()
        index_of = {parameter: i for i, parameter in enumerate(parameters)}
        seconds = np.zeros(len(index_of))
        typical = np.median(self._passes, axis=0) if self._passes else np.zeros(len(self._readers))
        for reader, duration in zip(self._readers, typical.tolist(), strict=True):
            indices = [index_of[parameter] for parameter in reader if parameter in index_of]
            for index in indices:
                seconds[index] += duration / len(indices)
        return seconds

    def _read_marks(self) -> None:
        """Convert the marks of the pass that has ended into seconds by reader."""
        if self._ended is None:
            return
        (visits, end), self._ended = self._ended, None
        if not visits:
            return
        origin = visits[0].reached
        reached = self._clock.since(origin, [*(visit.reached for visit in visits), end])
        received = self._clock.since(origin, [visit.received for visit in visits])
        seconds = np.zeros(len(self._readers))
        np.add.at(seconds, [visit.reader for visit in visits], np.maximum(reached[1:] - received, 0.0))
        self._passes = [*self._passes[1 - KEEP :], seconds]


# Updates of one step, applied for a few parameters at a time.

_PLAIN = (bool, int, float, str, tuple, type(None))  # values of a group that compare with ==


class Updates:
    """Updates of a step: combined gradients on their way, and the hyper-parameters as of that step.

    Parameters that no rank had a gradient for have an update only where a residual was sent, or with ``zero_unused``.
    ``p.grad`` is the script's own before and after.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, combined: Combined, zero_unused: bool) -> None:
        """Collective. Start the all-gathers of ``combined``, the result of the reduce-scatters."""
        buffers = combined.buffers
        assert buffers.scatter is not None
        self._optimizer, self._buffers, self._exchange = optimizer, buffers, buffers.scatter
        self._slot_of = dict(zip(buffers.flat.parameters, buffers.layout.slots, strict=True))  # by parameter
        self._groups = [_snapshot(group) for group in optimizer.param_groups]  # hyper-parameters as of this step
        self._group_of: dict[torch.Tensor, int] = {}  # parameters with a pending update, in the optimizer's order
        self._left_over: set[torch.Tensor] = set()  # of these, parameters that no rank used in this step
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                slot = self._slot_of.get(parameter)
                if slot is None:
                    continue
                if combined.used[slot.index] or zero_unused:
                    self._group_of[parameter] = number
                elif buffers.flat.arena_of[slot.index].memory.has_residual:  # known once it has arrived
                    self._group_of[parameter] = number
                    self._left_over.add(parameter)
        self._arriving: dict[int, InFlight] = {  # by slot: messages not yet waited for
            slot.index: in_flight for in_flight in self._exchange.gather() for slot in in_flight.loads[0].segment.slots
        }

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._group_of

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        """Return all parameters that take part: first those with an update, in the optimizer's order."""
        return tuple(dict.fromkeys([*self._group_of, *self._buffers.flat.parameters]))

    @property
    def done(self) -> bool:
        """Return whether everything has been received and applied."""
        return not self._group_of and not self._arriving

    def receive(self, parameter: torch.Tensor) -> None:
        """Collective. Wait for the message with this parameter's update, if it has not been waited for."""
        slot = self._slot_of.get(parameter)
        in_flight = None if slot is None else self._arriving.get(slot.index)
        if in_flight is not None:
            self._exchange.receive(in_flight)
            for other in in_flight.loads[0].segment.slots:
                del self._arriving[other.index]

    def apply(self, parameters: Iterable[torch.Tensor]) -> None:
        """Step the optimizer for those of ``parameters`` with a pending update. All have been received."""
        groups: dict[int, list[torch.Tensor]] = {}
        for parameter in parameters:
            if parameter in self._group_of:
                self._check_same(parameter)
                group = self._group_of.pop(parameter)
                left_over = parameter in self._left_over
                if not left_over or self._buffers.flat.left_over(self._slot_of[parameter]):
                    groups.setdefault(group, []).append(parameter)
        if groups:
            self._step([{**self._groups[number], "params": chosen} for number, chosen in groups.items()])

    def _step(self, groups: list[dict[str, Any]]) -> None:
        """Step the optimizer once, with these groups and the combined gradients; restore groups and ``p.grad``."""
        chosen = [parameter for group in groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in chosen]
        given = self._optimizer.param_groups  # the very list may be a scheduler's or another wrapper's too
        kept = given[:]
        try:
            for parameter in chosen:
                parameter.grad = self._buffers.flat.update(self._slot_of[parameter])
            given[:] = groups
            with ExitStack() as stack:
                # The forward around this may be one for inference, or in lower precision; the update is not.
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
                for kind in {parameter.device.type for parameter in chosen}:
                    if torch.is_autocast_enabled(kind):
                        stack.enter_context(torch.autocast(kind, enabled=False))
                before = [_plain(group) for group in groups]
                self._optimizer.step()
                self._check_unchanged(before, groups)
        finally:
            given[:] = kept
            for parameter, gradient in zip(chosen, gradients, strict=True):
                parameter.grad = gradient

    def _check_same(self, parameter: torch.Tensor) -> None:
        """Raise ``AGMergeError`` if a parameter has another dtype, device or shape than in ``step()``."""
        slot = self._slot_of[parameter]
        now, then = (gradient_dtype(parameter), parameter.device), (slot.tensor_class.dtype, slot.tensor_class.device)
        if now != then or tuple(parameter.shape) != slot.shape:
            raise AGMergeError(
                f"AGM116: Parameter {slot.name!r} changed before its update: it was {then[0]}{list(slot.shape)} on "
                f"{then[1]} in step(), and is now {now[0]}{list(parameter.shape)} on {now[1]}. Call optimizer.flush() "
                "between step() and the change."
            )

    def _check_unchanged(self, before: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        """Raise ``AGMergeError`` if a step has changed a value of a group. ``before``: the plain values."""
        for was, group in zip(before, groups, strict=True):
            now = _plain(group)
            changed = [key for key in {**was, **now} if key not in was or key not in now or was[key] != now[key]]
            if changed:
                raise AGMergeError(
                    f"AGM116: {type(self._optimizer).__name__}.step() changed {changed[0]!r} of its param group. "
                    "merging='dear' requires state per parameter, because it steps a few parameters at a time. Use "
                    "another merging."
                )


def check_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Raise ``ValueError`` if ``optimizer.step()`` has hooks."""
    hooks = (
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
        *optimizers._global_optimizer_pre_hooks.values(),
        *optimizers._global_optimizer_post_hooks.values(),
    )
    if any(hook not in seen_steps.OWN for hook in hooks):
        raise ValueError(
            f"merging='dear' is not supported with step hooks of {type(optimizer).__name__}, which would run once per "
            "module. Remove the hooks, or use another merging."
        )


def admit_group(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Remove the optimizer's last group again, with ``ValueError``, if ``model`` does not contain it."""
    try:
        check_readers(model, optimizer)
    except ValueError:
        optimizer.param_groups.pop()
        raise


def _snapshot(group: dict[str, Any]) -> dict[str, Any]:
    """Return copies of the hyper-parameters of a group as they are now: schedulers change tensors in place."""
    return {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a group that compare with ``==``."""
    return {key: value for key, value in group.items() if isinstance(value, _PLAIN)}


# The reducer.

STALE = (
    "AGM116: Parameter {name!r} got a gradient before its last update was applied, because no forward pass of its "
    "module ran since step(). Call the module that holds it, or call optimizer.flush() before this forward pass."
)
TOGETHER = (
    "not supported with merging='dear', because gradients are averaged during the next forward pass. Use another "
    "merging to clip or read gradients before step()."
)


class DearReducer(Reducer):
    """Reducer that leaves updates to the next forward, which applies them module by module, each exactly once.

    ``config.sync.model``: its forward reads the parameters. Raises ``ValueError`` for a parameter of the optimizer that
    is not in it, and for hooks on the optimizer's ``step()``.
    """

    remedy = TOGETHER[0].upper() + TOGETHER[1:]

    def __init__(self, members: ParameterTable, config: Config) -> None:
        """Hook the model's modules, and the optimizer's parameters as every reducer does."""
        assert config.sync.model is not None
        self.model, self._optimizer = config.sync.model, members.optimizer  # the inner optimizer
        self._updates: Updates | None = None  # of the last step, until all are applied
        self._combined: Combined | None = None  # result of the step that ends
        self._times: ForwardTimes | None = None  # for the merge buffers in use
        self._modules = ModuleHooks(self)
        check_hooks(self._optimizer)
        if gathered_of(members):
            raise ValueError(
                "merging='dear' is not supported with SparseAdam, whose gradients are gathered. Use another merging."
            )
        super().__init__(members, config, listener=self)
        self._modules.attach(self.model)

    def leave(self) -> None:
        """Refuse: updates of the last step may be on their way."""
        raise AGMergeError(
            "AGM116: merging='dear' cannot continue with other workers, because updates of the last step may not have "
            "arrived. Restart from a checkpoint, or use another merging."
        )

    def _on_agreement(self, buffers: MergeBuffers, times: RunningStepTimes) -> Plans:
        """Hook the present parameters and modules, and return a planner that measures backward and forward."""
        check_readers(self.model, self._optimizer)  # it may have got more parameters
        super()._on_agreement(buffers, times)
        self._modules.attach(self.model)
        self._times = ForwardTimes(buffers.clock, self._modules.readers)
        return Replanner(buffers, times, DearMeasurer(buffers, times, self))

    # -- a step ---------------------------------------------------------------------------------------------

    def on_gradient(self, parameter: torch.Tensor, name: str) -> None:
        """Collective. See :meth:`BackwardPasses.on_gradient`; the last update must have been taken before."""
        with self.passes.lock:
            if self._times is not None:
                self._times.end()
            if self._updates is not None:
                with self.exchange.fault.recording():
                    if parameter in self._updates:
                        raise AGMergeError(STALE.format(name=name))
                    self._updates.receive(parameter)  # its message must be free before the next one is written
        self.passes.on_gradient(parameter, name)

    def synchronize(self) -> None:
        """Refuse, with ``ValueError``: combined gradients exist in the next forward only."""
        raise ValueError(f"synchronize(): {TOGETHER}")

    def prepare_clipping(self, optimizer: Any) -> None:
        """Refuse, with ``ValueError``, as :meth:`synchronize`."""
        raise ValueError(f"clip_grad_norm_(): {TOGETHER}")

    def step(self, wrapper: torch.optim.Optimizer, closure: Any) -> Any:
        """Collective. Wait for the reduce-scatters; leave the update to the next forward. Return None.

        Pending updates of parameters that the last forward has not read are applied first. Refuses a closure and
        ``skip_synchronize()`` with ``ValueError``.
        """
        self.connect()
        if closure is not None:
            raise ValueError(
                "step(closure) is not supported with merging='dear', which applies updates in the next forward pass. "
                "Run the closure's forward and backward before step()."
            )
        if not self._combines:
            raise ValueError(f"step() inside skip_synchronize(): {TOGETHER}")
        check_hooks(self._optimizer)
        if self.exchange.group.outside:
            return self._optimizer.step()
        with self.passes.lock:
            self.exchange.fault.check()
            self.flush()
            super().synchronize()
            if self.skipped or self.idle:
                self.discard()
                return None
            with torch.no_grad(), self.exchange.fault.recording():
                assert self._combined is not None
                self._updates = Updates(self._optimizer, self._combined, self.exchange.agreed.config.sync.zero_unused)
                self._combined = None
            self.end_step()
        return None

    def _attach(self, combined: Combined) -> None:
        """Store the combined gradients. The updates are not there yet, and ``p.grad`` stays the script's own."""
        check_attachable(combined, self.exchange, is_active=self.participation.flag == Flag.ACTIVE)
        self._combined = combined

    def end_step(self) -> None:
        """Collective. See :meth:`Reducer.end_step`; replicas are compared with all updates applied."""
        every = self.exchange.agreed.config.guards.check_every
        if every and (self.exchange.agreed.step + 1) % every == 0:  # the first comparison is of the initial parameters
            self.flush()
        super().end_step()
        buffers = self.exchange.agreed.buffers
        if self._times is not None and buffers is not None and self.exchange.agreed.times.measures_next(buffers.clock):
            self._times.begin()

    # -- updates --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def before_forward(self, number: int, parameters: Parameters) -> None:
        """Collective. Wait for the messages of ``parameters``, which a forward is about to read, and update them.

        ``number``: which of the readers of the model runs.
        """
        times = self._times
        if times is None or (self._updates is None and not times.open):
            return
        with self.passes.lock:
            mark = times.mark()
            if self._updates is None:
                times.reached(number, mark)
                return
            with self.exchange.fault.recording():
                self._receive(self._updates, parameters)
                times.reached(number, mark)
                self._updates.apply(parameters)
            if self._updates.done:
                self._updates = None

    @torch.no_grad()
    def flush(self) -> None:
        """Collective. Apply every pending update.

        Its messages are under way already, so that ranks need not call this at the same time.
        """
        with self.passes.lock:
            updates, self._updates = self._updates, None
            if updates is not None:
                with self.exchange.fault.recording():
                    self._receive(updates, updates.parameters)
                    updates.apply(updates.parameters)

    def _receive(self, updates: Updates, parameters: Parameters) -> None:
        """Collective. Wait for the messages of these parameters; the time counts as exposed."""
        begin = time.perf_counter()
        for parameter in parameters:
            updates.receive(parameter)
        self.exchange.agreed.times.add_exposed(time.perf_counter() - begin)

    def forward_seconds(self) -> Seconds:
        """Return the seconds of forward of each tensor of the merge buffers, (n,), as measured on this rank."""
        assert self.exchange.agreed.buffers is not None and self._times is not None
        return self._times.of(self.exchange.agreed.buffers.flat.parameters)

    # -- guards ---------------------------------------------------------------------------------------------

    def check_idle(self, what: str) -> None:
        """Collective. See :meth:`Reducer.check_idle`; updates that are pending are applied."""
        super().check_idle(what)
        self.flush()

    def close(self) -> None:
        """Collective. Apply pending updates, unless the exchange is broken, and remove all hooks."""
        try:
            if not self.exchange.fault:
                self.flush()
        finally:
            self._modules.remove()
            super().close()
