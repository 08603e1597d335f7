# SPDX-License-Identifier: Apache-2.0
"""Hooks of an optimizer that the script or a framework steps, with the work of ``sync="updates"`` around a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from agmerge.engine.outermost_step import OutermostStep
from agmerge.engine.own_step import OwnStep, not_finite, unscale
from agmerge.engine.update_reducer import UpdateReducer
from agmerge.errors import AGMergeError
from agmerge.tensors.parameters import ParameterTable, optimizers_of

TWICE = (
    "AGM122: {early} stepped twice before {late} stepped once. With sync='updates', call step() of every optimizer "
    "exactly once per training step. Otherwise use sync='gradients'."
)


def follow(reducer: UpdateReducer, check: Callable[[], None] = lambda: None) -> Callable[[], None]:
    """Exchange the updates of the optimizer of ``reducer`` whenever it steps; return a function that ends that.

    Each of several optimizers steps by itself, in any order, and their updates are exchanged together when each of them
    has stepped once. Each step is collective. The optimizer objects stay the same for schedulers, frameworks and
    checkpoints. An optimizer with a gradient that is infinite or NaN moves nothing: it is given no gradients then.
    ``check`` is called before each step, and raises where there should be none.
    """
    together = _Together(reducer, check)
    ends = [_follow_one(optimizer, together) for optimizer in optimizers_of(reducer.members.optimizer)]

    def end() -> None:
        for each in ends:
            each()

    return end


def _follow_one(optimizer: Any, together: _Together) -> Callable[[], None]:
    """Register hooks on the steps of one optimizer; return a function that removes them."""
    # A GradScaler calls optimizers that check for infinities themselves even if there are some. Else a step that it
    # leaves out on one rank would have no hooks there, and the others would wait for it.
    looks_itself = getattr(optimizer, "_step_supports_amp_scaling", False)
    optimizer._step_supports_amp_scaling = True
    step, outermost = _Step(together.reducer.members, optimizer, looks_itself), OutermostStep()

    def before(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not outermost.begins():
            return args, kwargs
        together.check(optimizer)
        args, kwargs = _closed(args, kwargs)
        together.begin()
        step.begin()
        return args, kwargs

    def after(*_: object) -> None:
        if outermost.ends():
            together.end(optimizer, step.end())

    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]

    def end() -> None:
        for handle in handles:
            handle.remove()
        if not looks_itself:
            del optimizer._step_supports_amp_scaling

    return end


class _Together:
    """Steps of all optimizers together: how many have stepped, and when the common step begins and ends."""

    def __init__(self, reducer: UpdateReducer, check: Callable[[], None]) -> None:
        self.reducer, self._check = reducer, check
        self._optimizers = optimizers_of(reducer.members.optimizer)
        self._steps: dict[int, OwnStep] = {}  # of those that have stepped since the last exchange was due, by identity

    def check(self, optimizer: Any) -> None:
        """Raise :class:`agmerge.AGMergeError` unless ``optimizer`` may step now."""
        self._check()
        if id(optimizer) in self._steps:
            names = {id(each): f"optimizers[{i}] ({type(each).__name__})" for i, each in enumerate(self._optimizers)}
            late = " and ".join(name for key, name in names.items() if key not in self._steps)
            raise AGMergeError(TWICE.format(early=names[id(optimizer)], late=late))

    def begin(self) -> None:
        """Collective. Begin a common step before the first of the optimizers moves its parameters.

        Before a later one steps, use parameters that needed no gradient when the first one did.
        """
        if not self._steps:
            self.reducer.before_step()
        else:
            self.reducer.use_present()

    def end(self, optimizer: Any, step: OwnStep) -> None:
        """Collective. Record a step of ``optimizer``; after that of the last one count it, and make the exchange due.

        Raises as :meth:`UpdateReducer.after_step` does.
        """
        self._steps[id(optimizer)] = step
        if len(self._steps) < len(self._optimizers):
            return
        steps, self._steps = self._steps.values(), {}
        left_out = [each for each in steps if not each.stepped]
        bad = tuple(name for each in left_out for name in each.bad)
        scaled = all(each.scaled for each in left_out)
        self.reducer.after_step(OwnStep(stepped=not left_out, scaled=scaled, bad=bad))


def _closed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a step after calling its closure, which makes the gradients to be checked."""
    optimizer, *given = args  # a closure is the first argument, or has its name
    closure = given[0] if given else kwargs.get("closure")
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    rest = {name: value for name, value in kwargs.items() if name != "closure"}
    return (optimizer, lambda: loss, *given[1:]), rest


class _Step:
    """Check of the gradients of each step of an optimizer, which withholds them from a step that is to do nothing.

    ``looks_itself``: the optimizer reads a GradScaler's scale and finding as attributes.
    """

    def __init__(self, members: ParameterTable, optimizer: Any, looks_itself: bool) -> None:
        self._members, self._optimizer, self._looks_itself = members, optimizer, looks_itself
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # by parameter, while withheld
        self._of_scaler: dict[str, Any] = {}  # attributes of the optimizer that a GradScaler has set, likewise
        self._bad: tuple[str, ...] = ()  # names of parameters with gradients that are not finite
        self._is_made = True  # False: nothing moves
        self._is_scaled = False  # a GradScaler steps

    def begin(self) -> None:
        """Withhold all gradients from the optimizer if one is infinite or NaN. Waits once for a device."""
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        attributes = vars(self._optimizer)
        self._is_scaled, self._bad = "found_inf" in attributes, ()
        if not self._is_scaled:
            self._bad = not_finite(self._members, parameters)
            self._is_made = not self._bad
        elif self._looks_itself:
            self._is_made = True  # by the optimizer, perhaps in vain: see end()
        else:
            self._of_scaler = {name: attributes.pop(name) for name in ("found_inf", "grad_scale")}
            self._is_made = not self._of_scaler["found_inf"].item()
            if self._is_made:
                unscale(self._optimizer, self._of_scaler["grad_scale"])
        held = [] if self._is_made else parameters
        self._gradients = [(parameter, parameter.grad) for parameter in held]
        for parameter in held:
            parameter.grad = None

    def end(self) -> OwnStep:
        """Put gradients and attributes back; return the result of the step."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        vars(self._optimizer).update(self._of_scaler)
        if self._is_scaled and self._looks_itself:
            self._is_made = not self._optimizer.found_inf.item()  # asked once the step is queued
        self._gradients, self._of_scaler = [], {}
        return OwnStep(stepped=self._is_made, scaled=self._is_scaled, bad=self._bad)
