# SPDX-License-Identifier: Apache-2.0
"""Support of ``torch.amp.GradScaler``: residuals have no scale, ``p.grad`` has it, so that recipes need no change.

A gradient is divided by the scale when it is handed over, and the combined update multiplied by it. Changes of the
scale then do not reach residuals, and the scaler finds the gradients that it expects: with its scale, and the same on
all ranks.
"""

from __future__ import annotations

import os
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from agmerge.errors import AGMergeError
from agmerge.tensors.dtensors import local_of
from agmerge.tensors.parameters import ParameterTable

NOT_ATTACHED = (
    "AGM115: GradScaler.step(): the scaler is not attached. Pass scaler=scaler to DistributedOptimizer, or call "
    "optimizer.attach_scaler(scaler), on every rank."
)
NOT_BY_SCALER = (
    "AGM115: step(): the gradients still contain the scale of the attached GradScaler. Call scaler.step(optimizer), "
    "then scaler.update()."
)
NOT_GIVEN = (
    "AGM602: The script scales its loss with a GradScaler that compress() does not know, so residuals would contain "
    "its changing scale. No parameter was stepped. Pass it on every rank: agmerge.integrations.ddp.compress(model, "
    "optimizer=optimizer, scaler=scaler)."
)
SCALERS = os.path.join("amp", "grad_scaler.py")  # the end of the path of torch's file
DEEP = 8  # calls, from GradScaler.step() to a hook of the optimizer's step


def check_dtypes(members: ParameterTable, scaled: bool) -> None:
    """Raise ``ValueError`` for a parameter with gradients that no GradScaler accepts. ``scaled``: there is one."""
    for parameter in members.name_all() if scaled else ():
        if parameter.dtype == torch.float16:
            raise ValueError(
                f"parameter {members.name_of(parameter)!r} is torch.float16, which GradScaler does not support. Keep "
                "parameters in float32 and use torch.autocast for float16."
            )


class LossScale:
    """Loss scale of one scaler (None: there is none), taken off gradients and given back to updates."""

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self.scaler = scaler
        self.combined = False  # the gradients of this step were combined because the scaler asked
        self._divided: set[int] = set()  # by identity of the parameter: a repeated attempt asks again
        self._inverses: dict[torch.device, torch.Tensor] = {}  # 1 / scale, of this step

    def divided(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Return the gradient without the scale: divided in place, once a step. Waits for no device."""
        scale = self._scale()
        if gradient is None or scale is None or id(parameter) in self._divided:
            return gradient
        self._divided.add(id(parameter))
        if gradient.device not in self._inverses:  # as GradScaler.unscale_ does; the scale changes between steps
            self._inverses[gradient.device] = scale.double().reciprocal().float().to(gradient.device)
        return gradient.mul_(self._inverses[gradient.device])

    def multiply(self, updates: Iterable[torch.Tensor]) -> None:
        """Multiply updates by the scale, in place."""
        scale = self._scale()
        if scale is not None:
            for update in map(local_of, updates):
                update.mul_(scale.to(update.device))

    def clear(self) -> None:
        """Forget the step, which has ended or comes to nothing."""
        self._divided, self._inverses, self.combined = set(), {}, False

    def mark_combined(self) -> None:
        """Record that the gradients of this step were combined because the scaler asked."""
        self.combined = True

    def check_step(self, optimizer: torch.optim.Optimizer, closure: Any) -> None:
        """Raise unless ``optimizer`` steps because the scaler, if there is one, calls it."""
        if self.scaler is None:
            return
        if closure is not None:
            raise ValueError(
                "step(closure) is not supported with a GradScaler, because the closure's loss would not be scaled. "
                "Remove the closure or the scaler."
            )
        state = self.scaler._per_optimizer_states.get(id(optimizer), {"stage": OptState.READY})
        if state["stage"] is not OptState.UNSCALED:
            raise AGMergeError(NOT_BY_SCALER)

    def _scale(self) -> torch.Tensor | None:
        return None if self.scaler is None else self.scaler._get_scale_async()


class UnscaleHook:
    """Replacement of an attached scaler's ``unscale_``, which combines the gradients of ``optimizer`` first.

    The plain recipe calls it right after ``backward()``, by itself or in ``scaler.step(optimizer)``, when ``p.grad`` is
    still this rank's own. Clipping and the check for infinities have to see the combined gradients.
    """

    def __init__(self, scaler: torch.amp.GradScaler, optimizer: Any, combine: Callable[[Any], None]) -> None:
        """Call ``combine`` first, a bound method that takes the scaler. It and ``optimizer`` are held weakly."""
        self._scaler, self._before = scaler, scaler.unscale_
        self._optimizer, self._combine = weakref.ref(optimizer), weakref.WeakMethod(combine)

    def __call__(self, optimizer: torch.optim.Optimizer) -> None:
        """Collective. Combine the gradients of ``optimizer`` if it is the one attached, and unscale them."""
        combine = self._combine()
        if optimizer is self._optimizer() and combine is not None:
            combine(self._scaler)
        self._before(optimizer)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the scaler has no optimizer yet.
        return _plain, (self._scaler,)


def _plain(scaler: torch.amp.GradScaler) -> Any:
    """Return the scaler's own ``unscale_``. Pickles of scalers call this."""
    return types.MethodType(type(scaler).unscale_, scaler)


def refuse_unknown(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Raise :class:`agmerge.AGMergeError` in the first step of ``optimizer``, if a GradScaler makes it.

    For reducers that were given no scaler. Returns a function that ends it.
    """
    known = False  # that there is none

    def before(*_: Any) -> None:
        nonlocal known
        if not known and _scaler_steps():
            raise AGMergeError(NOT_GIVEN)
        known = True

    return optimizer.register_step_pre_hook(before).remove


def _scaler_steps() -> bool:
    """Return whether the optimizer's step that has called here was called by an enabled GradScaler."""
    frame, left = sys._getframe(1).f_back, DEEP
    while frame is not None and left:
        scaler, left = frame.f_locals.get("self"), left - 1
        if isinstance(scaler, torch.amp.GradScaler) and frame.f_code.co_filename.endswith(SCALERS):
            return scaler.is_enabled()
        frame = frame.f_back
    return False
