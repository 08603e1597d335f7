# SPDX-License-Identifier: Apache-2.0
"""Replica of a worker that steps by itself, ahead of the parameters that all workers share."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from agmerge.errors import AGMergeError, NonFiniteError, and_more
from agmerge.script.averaged_steps import check_not_averaged
from agmerge.script.parameter_access import ScriptAccess, watch_straying
from agmerge.step.config import APPLY, HOLD, Config, Updates
from agmerge.step.gradient_exchange import MOST_IN_A_ROW, GradientExchange
from agmerge.tensors.nonfinite import RAISE, is_finite
from agmerge.tensors.parameters import ParameterInfo, ParameterTable, is_dtensor, local_of
from agmerge.updates.shared_parameters import SharedParameters, UnsentInParameters, UnsentInResidual, wide
from sparsifiers.memories import Memory, Residual

# Step an optimizer with this worker's own gradients, unless one of them is infinite or NaN.


@dataclass(frozen=True)
class OwnStep:
    """Result of one step of this worker's optimizer."""

    result: Any = None  # the closure's loss, or the result of the optimizer's step
    stepped: bool = True  # False: gradients were not finite
    scaled: bool = False  # by a GradScaler, which checks for that itself
    bad: tuple[str, ...] = ()  # parameters with gradients that were not finite, if checked in this file


class OwnSteps:
    """Steps of this worker's optimizer: how many, and which gradients were not finite since the last exchange."""

    def __init__(self) -> None:
        self.count = 0  # of the optimizer's steps, exchanged or not
        self._bad: tuple[str, ...] = ()  # parameters with gradients that were not finite, since the last exchange
        self._skipped_in_a_row = 0

    def made(self) -> None:
        """Count a step."""
        self.count += 1

    def check(self, step: OwnStep, exchange: GradientExchange) -> None:
        """Count a step that was left out. Where that is an error, all ranks raise it at the next exchange.

        A lone worker raises :class:`agmerge.NonFiniteError` at once.
        """
        if step.stepped:
            self._skipped_in_a_row = 0
            return
        self._skipped_in_a_row += 1
        exchange.agreed.totals.skipped(0, 0)
        raises = exchange.agreed.config.guards.nonfinite == RAISE and not step.scaled
        if raises or self._skipped_in_a_row >= MOST_IN_A_ROW:
            self._bad = tuple(dict.fromkeys([*self._bad, *(step.bad or ("(found by the GradScaler)",))]))
            if exchange.group.alone:
                names = and_more(self.drain())
                raise NonFiniteError(f"AGM106: Gradients are infinite or NaN: {names}. The optimizer has not stepped.")

    def drain(self) -> tuple[str, ...]:
        """Return the parameters with gradients that were not finite, and forget them: the next exchange says so."""
        bad, self._bad = self._bad, ()
        return bad

    def restart(self, count: int) -> None:
        """Begin after so many steps."""
        self.count, self._bad = count, ()


Stepping = Callable[[Any], None]  # called with an optimizer that is about to step, with finite gradients


def own_step(
    members: ParameterTable, wrapper: Any, closure: Callable[[], Any] | None, stepping: Stepping = lambda _: None
) -> OwnStep:
    """Step the optimizer of ``members``, unless a gradient is infinite or NaN. Waits once for a device.

    A ``torch.amp.GradScaler`` leaves the scale and its finding as attributes of ``wrapper``, which is its contract for
    optimizers that take a scale. ``closure`` is called once, before.
    """
    inner, loss = members.optimizer, None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    found = vars(wrapper).get("found_inf")
    if found is not None:
        return _scaled_step(inner, found, vars(wrapper).get("grad_scale"), stepping)
    bad = not_finite(members)
    if bad:
        return OwnStep(loss, stepped=False, bad=bad)
    stepping(inner)
    result = inner.step()
    return OwnStep(loss if closure is not None else result)


def _scaled_step(inner: Any, found: torch.Tensor, scale: torch.Tensor | None, stepping: Stepping) -> OwnStep:
    """Step ``inner`` with gradients that have ``scale`` (None: no more), unless ``found`` is 1: one has overflowed."""
    if getattr(inner, "_step_supports_amp_scaling", False):  # it checks for infinities itself, on the device
        inner.grad_scale, inner.found_inf = scale, found
        try:
            stepping(inner)
            return OwnStep(inner.step(), stepped=not found.item(), scaled=True)  # asked once the step is queued
        finally:
            del inner.grad_scale, inner.found_inf
    if found.item():
        return OwnStep(stepped=False, scaled=True)
    unscale(inner, scale)
    stepping(inner)
    return OwnStep(inner.step(), scaled=True)


def unscale(optimizer: torch.optim.Optimizer, scale: torch.Tensor | None) -> None:
    """Divide the gradients of ``optimizer`` by ``scale``, in place; None: they have none."""
    if scale is None:
        return
    inverse = scale.double().reciprocal().float()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                gradient = local_of(parameter.grad)
                gradient.mul_(inverse.to(gradient.device))


def not_finite(members: ParameterTable, parameters: Iterable[torch.Tensor] | None = None) -> tuple[str, ...]:
    """Return the names of the parameters with a gradient that is infinite or NaN. Waits once for each device.

    ``parameters``: which of ``members`` are checked; None: all.
    """
    named = members.name_all()
    looked_at = named if parameters is None else parameters
    given = {members.name_of(p): local_of(p.grad) for p in looked_at if p.grad is not None}
    gradients = {
        name: gradient if gradient.layout == torch.strided else gradient._values()
        for name, gradient in given.items()
        if gradient.numel()
    }
    on_devices = {name: gradient for name, gradient in gradients.items() if gradient.device.type != "cpu"}
    bad = [name for name, gradient in gradients.items() if name not in on_devices and not is_finite(gradient)]
    by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, gradient in on_devices.items():
        by_device.setdefault(gradient.device, {})[name] = gradient
    for group in by_device.values():
        norms = torch._foreach_norm(list(group.values()), math.inf)
        finite = torch.stack([norm.float().isfinite() for norm in norms]).tolist()
        bad += [name for name, is_good in zip(group, finite, strict=True) if not is_good]
    return tuple(bad)


# Table of the deltas that are exchanged: of the parameters, from this worker's to the shared ones.


class DeltaTable:
    """Table of the deltas that are exchanged: of the parameters, in float32 or wider.

    A parameter that has taken part goes on, also when it is frozen: some of its updates may not have been sent yet. So
    does one that is frozen and has a gradient, which the optimizer steps with.

    """

    def __init__(self, members: ParameterTable) -> None:
        self._members = members
        self._more: Callable[[Sequence[ParameterInfo]], ParameterInfo | None] | None = None
        self._tracked: set[str] = set()  # parameters that take part whether they need a gradient or not

    def track(self, names: Iterable[str]) -> None:
        """Make these parameters take part from now on, whether they need a gradient or not."""
        self._tracked.update(names)

    def average_along(self, more: Callable[[Sequence[ParameterInfo]], ParameterInfo | None] | None) -> None:
        """Average one more dense tensor with the deltas, from the next agreement on.

        ``more``: returns it for the parameters that take part. None, or if that returns None: there is none.
        """
        self._more = more

    def parameters(self) -> list[ParameterInfo]:
        """Return the parameters that take part."""
        self._taking_part()  # so that frozen ones with a gradient are tracked
        return [replace(one, dtype=one.parameter.dtype) for one in self._members.active(self._tracked)]

    def _taking_part(self) -> list[torch.Tensor]:
        """Return the script's tensors of :meth:`parameters`; track those that are frozen and have a gradient."""
        every, name_of = self._members.name_all(), self._members.name_of
        self.track(name_of(p) for p in every if not p.requires_grad and p.grad is not None)
        return [p for p in every if p.requires_grad or name_of(p) in self._tracked]

    @property
    def is_narrow(self) -> bool:
        """Return whether a parameter has 16 bits, which cannot hold its unsent updates exactly."""
        return any(wide(member.dtype) != member.dtype for member in self.parameters())

    def active(self) -> list[ParameterInfo]:
        """Return those of :meth:`parameters`, each with the dtype of its delta, and what is averaged along."""
        parameters = self.parameters()
        more = None if self._more is None else self._more(parameters)
        deltas = [replace(member, dtype=wide(member.dtype)) for member in parameters]
        return deltas if more is None else [*deltas, more]

    def names(self) -> set[str]:
        """Return the names of all parameters of the optimizer."""
        return self._members.names()

    def snapshot(self) -> object:
        """Return identity, dtype, device and shape of what takes part: if they differ, ranks agree again.

        Of DTensors also the address of this rank's shard, which is written to.
        """
        taking_part = self._taking_part()
        sharded = [local_of(parameter).data_ptr() for parameter in taking_part if is_dtensor(parameter)]
        return [(id(p), p.dtype, p.device, p.shape) for p in taking_part], sharded


class LocalReplica:
    """Replica of a worker that steps by itself: the shared parameters, its own, and the count of its steps.

    ``members``: all parameters of the optimizer; ``table``: the deltas of those that take part, which ``exchange``
    exchanges.
    """

    def __init__(self, members: ParameterTable, table: DeltaTable, exchange: GradientExchange) -> None:
        self._members, self._table, self._exchange = members, table, exchange
        self.own_steps = OwnSteps()  # exchanged or not
        self._snapshot: object = None  # of the table, as of the last check
        self.strayed = watch_straying(self)
        self._access = ScriptAccess(self)  # the script's, to the parameters, between steps
        self.shared = self._fitting()

    @property
    def _options(self) -> Updates:
        updates = self._exchange.agreed.config.sync.updates
        assert updates is not None
        return updates

    @property
    def steps(self) -> int:
        """Return how many steps the optimizer has made."""
        return self.own_steps.count

    # -- which parameters, and where their unsent deltas stay -----------------------------------------------------

    def _fitting(self) -> SharedParameters:
        """Return shared parameters for the present config, and give the exchange the memory that they need."""
        options, memory = self._options, self.memory_for(self._exchange.agreed.config)
        self._exchange.agreed.adopt(self._exchange.agreed.config.changed(memory=memory))
        if memory.hands_back or (not memory.has_residual and not self._table.is_narrow):
            return UnsentInParameters(self._exchange, options.outer, overlap=options.overlap > 0)
        is_applied = options.carry == APPLY
        return UnsentInResidual(self._exchange, options.outer, applied=is_applied, overlap=options.overlap > 0)

    def memory_for(self, config: Config) -> Memory:
        """Return the memory of unsent updates with ``config``; a residual that exists is kept in any case."""
        assert config.sync.updates is not None
        memory = config.sync.updates.memory_for(config.compression.compressor, narrow=self._table.is_narrow)
        return Residual() if self._exchange.agreed.current.residuals() and not memory.has_residual else memory

    def refit(self) -> None:
        """Keep unsent deltas where the memory and the dtypes ask for. Nothing is under way."""
        before, self.shared = self.shared, self._fitting()
        self.shared.adopt(before)

    def admit(self, flush: Callable[[], None]) -> bool:
        """Collective. Use the parameters that take part now. They stay as long as the optimizer has them.

        ``flush``: receives what is under way, which is of those that took part before. Returns whether there are new
        ones since the first step: their values have to be equal on all ranks. Raises ``ValueError``, at first, where a
        framework has wrapped the model after the optimizer, and averages gradients.
        """
        snapshot = self._table.snapshot()
        if snapshot == self._snapshot:
            return False
        is_first, has_new = (
            self._snapshot is None,
            self._admit_present(),
        )  # ranks may have to agree first, on the parameters that there are now
        if is_first:
            check_not_averaged(self._members)
        else:
            flush()
            self.refit()
        self._snapshot = snapshot
        return has_new and not is_first

    def _admit_present(self) -> bool:
        has_new = self.shared.admit({member.name: member.local for member in self._table.parameters()})
        self._table.track(self.shared.own)
        return has_new

    def absorb_residuals(self) -> None:
        """Subtract residuals kept beside the parameters from these: a lone worker sends nothing any more."""
        for name, residual in self._exchange.agreed.current.residuals().items():
            if self._options.carry == HOLD and name in self.shared.own:
                self.shared.own[name].detach().sub_(residual)
            self._exchange.agreed.carried.stash("residual", name, None)

    # -- what differs from the shared parameters ------------------------------------------------------------------

    def compared(self) -> dict[str, torch.Tensor]:
        """Return the tensors that must be equal on all ranks after a step, by name: the shared parameters."""
        return dict(self.shared.base)

    @torch.no_grad()
    def unsent(self) -> dict[str, torch.Tensor]:
        """Return the sum of this worker's deltas that were not sent, by name of the parameter."""
        return {name: self.shared.unsent(name) for name in self.shared.base}

    def showing(self, but: Container[str] = ()) -> AbstractContextManager[None]:
        """Make the parameters, inside, the shared ones, all ``but`` some. Changes inside are lost.

        States that are saved inside have this worker's own all the same.
        """
        self.strayed.seen()
        if not but and not self.shared.is_shown:
            self._access.check(self.shared)  # it does not show what the script has written
        return self.shared.shown(but)

    def check_not_shown(self, what: str) -> None:
        """Raise :class:`agmerge.AGMergeError` inside of :meth:`showing`, where changes would be undone."""
        if self.shared.is_shown:
            raise AGMergeError(
                f"AGM117: {what} inside shared(): changes of parameters would be lost. Call it outside shared()."
            )

    def shared_values(self, but: Container[str] = ()) -> dict[torch.Tensor, torch.Tensor]:
        """Return the shared parameters, by parameter, all ``but`` some; nothing before the first step."""
        self.strayed.seen()
        base, members = self.shared.base, self._members
        names = {p: members.name_of(p) for p in members.name_all()}
        return {p: base[name] for p, name in names.items() if name in base and name not in but}

    # -- what the script does between steps -----------------------------------------------------------------------

    def begin_between(self) -> None:
        """Begin the time between two steps: the parameters are as this step, and its exchange, have left them."""
        self._access.begin(self.shared, self.steps)

    def end_between(self) -> None:
        """End the time between two steps; warn, once, of a script that has written parameters."""
        self._access.end(self.shared)

    def follow_own(self) -> None:
        """Make this worker's parameters the shared ones, because it is alone; writes by the script are not reported."""
        self._access.forget()
        self.shared.follow_own()

    def left(self) -> None:
        """Record that this library has moved the parameters."""
        self._access.left(self.shared)

    def written(self) -> list[str]:
        """Return the names of the parameters that the script has written since the last step; warn, once, of them."""
        return self._access.written(self.shared)

    def saved_own(self) -> None:
        """Warn, once, of a script that saves this worker's own parameters, if they are not the shared ones."""
        self._access.saved(self.shared)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def saved(self) -> dict[str, Any]:
        """Return the shared parameters, this worker's own, the outer optimizer and the steps.

        Unsent updates are the difference of the two; those kept beside parameters are among the residuals. When they
        are distributed over another number of workers, ``displacements`` take the place of ``own``. ``owed``: what this
        rank, as an owner of sums, owes to all of ``workers``.
        """
        base, own = self.shared.base, self.shared.own
        comm, state = self._exchange.group.comm, self._exchange.agreed.current.tensors
        return {
            "owed": {name: tensor.clone() for (kind, name), tensor in state.items() if kind == "owed"},
            "workers": 1 if comm is None else comm.size,
            "carry": self._options.carry,
            "steps": self.steps,
            "base": {name: tensor.clone() for name, tensor in base.items()},
            "own": {name: own[name].detach().clone() for name in base if name in own},
            "displacements": {},
            "outer": self.shared.outer_state(),
        }

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Restore the result of :meth:`saved`; None: the present parameters become the shared ones.

        Parameters are moved to where they were. Call it once residuals are restored.
        """
        self.check_not_shown("load_state_dict()")
        self.shared, self._snapshot = self._fitting(), None
        self.own_steps.restart(self.steps if saved is None else saved["steps"])
        if saved is not None and saved["base"]:  # else a lone worker saved it, without shared parameters
            self._table.track(saved["base"])
            self._admit_present()
            self.shared.restore(saved["base"], saved["own"], saved["displacements"])
            self.shared.load_outer_state(saved["outer"])
            self._snapshot = self._table.snapshot()
            self.left()
