# SPDX-License-Identifier: Apache-2.0
"""Step an optimizer with this worker's own gradients, unless one of them is infinite or NaN."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from agmerge.errors import NonFiniteError, and_more
from agmerge.step.gradient_exchange import MOST_IN_A_ROW, GradientExchange
from agmerge.tensors.nonfinite import RAISE, is_finite
from agmerge.tensors.parameters import ParameterTable, local_of


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


def own_step(members: ParameterTable, wrapper: Any, closure: Callable[[], Any] | None) -> OwnStep:
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
        return _scaled_step(inner, found, vars(wrapper).get("grad_scale"))
    bad = not_finite(members)
    if bad:
        return OwnStep(loss, stepped=False, bad=bad)
    result = inner.step()
    return OwnStep(loss if closure is not None else result)


def _scaled_step(inner: Any, found: torch.Tensor, scale: torch.Tensor | None) -> OwnStep:
    """Step ``inner`` with gradients that have ``scale`` (None: no more), unless ``found`` is 1: one has overflowed."""
    if getattr(inner, "_step_supports_amp_scaling", False):  # it checks for infinities itself, on the device
        inner.grad_scale, inner.found_inf = scale, found
        try:
            return OwnStep(inner.step(), stepped=not found.item(), scaled=True)  # asked once the step is queued
        finally:
            del inner.grad_scale, inner.found_inf
    if found.item():
        return OwnStep(stepped=False, scaled=True)
    unscale(inner, scale)
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
