"""Follow an optimizer that somebody else steps: what ``sync="updates"`` does around a step hangs on hooks of its."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from agmerge.engine.own_step import not_finite, unscale
from agmerge.engine.update_reducer import UpdateReducer


def follow(reducer: UpdateReducer, check: Callable[[], None] = lambda: None) -> Callable[[], None]:
    """Exchange what the optimizer of ``reducer`` does whenever it steps; return a function that ends it.

    Each step is then collective. The optimizer itself stays what it is, for whoever holds it: schedulers, frameworks,
    checkpoints. A step with a gradient that is not finite moves nothing: the optimizer finds no gradients then.
    ``check`` is called before each step, and raises where there should be none.
    """
    optimizer: Any = reducer.members.optimizer
    # A GradScaler calls optimizers that look for infinities themselves also where there are some. Else a step that it
    # leaves out on one rank would have no hooks there, and the others would wait for it.
    looks_itself = getattr(optimizer, "_step_supports_amp_scaling", False)
    optimizer._step_supports_amp_scaling = True
    step = _Step(reducer, looks_itself)

    def before(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        check()
        args, kwargs = _closed(args, kwargs)
        reducer.before_step()
        step.begin()
        return args, kwargs

    def after(*_: object) -> None:
        step.end()
        reducer.after_step()

    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]

    def end() -> None:
        for handle in handles:
            handle.remove()
        if not looks_itself:
            del optimizer._step_supports_amp_scaling

    return end


def _closed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a step, of which a closure has been called: it makes the gradients that are looked at."""
    optimizer, *given = args  # a closure is the first argument, or has its name
    closure = given[0] if given else kwargs.get("closure")
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    rest = {name: value for name, value in kwargs.items() if name != "closure"}
    return (optimizer, lambda: loss, *given[1:]), rest


class _Step:
    """Look at the gradients of each step, and hold them while it shall come to nothing.

    ``looks_itself``: the optimizer takes a GradScaler's scale, and what that has found, as attributes.
    """

    def __init__(self, reducer: UpdateReducer, looks_itself: bool) -> None:
        self._reducer, self._looks_itself = reducer, looks_itself
        self._optimizer: Any = reducer.members.optimizer
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # by parameter, while they are held
        self._of_scaler: dict[str, Any] = {}  # attributes of the optimizer that a GradScaler has set, likewise
        self._bad: tuple[str, ...] = ()  # names of parameters with gradients that are not finite
        self._is_made = True  # False: nothing moves
        self._is_scaled = False  # a GradScaler steps

    def begin(self) -> None:
        """Take all gradients away from the optimizer if one is not finite. Waits once for a device."""
        members, attributes = self._reducer.members, vars(self._optimizer)
        self._is_scaled, self._bad = "found_inf" in attributes, ()
        if not self._is_scaled:
            self._bad = not_finite(members)
            self._is_made = not self._bad
        elif self._looks_itself:
            self._is_made = True  # by the optimizer, perhaps in vain: see end()
        else:
            self._of_scaler = {name: attributes.pop(name) for name in ("found_inf", "grad_scale")}
            self._is_made = not self._of_scaler["found_inf"].item()
            if self._is_made:
                unscale(self._optimizer, self._of_scaler["grad_scale"])
        held = [] if self._is_made else members.name_all()
        self._gradients = [(parameter, parameter.grad) for parameter in held]
        for parameter in held:
            parameter.grad = None

    def end(self) -> None:
        """Put everything back where it was, and count the step. Raises as :meth:`UpdateReducer.count_step` does."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        vars(self._optimizer).update(self._of_scaler)
        if self._is_scaled and self._looks_itself:
            self._is_made = not self._optimizer.found_inf.item()  # asked once the step is queued
        self._gradients, self._of_scaler = [], {}
        self._reducer.count_step(self._is_made, self._bad, scaled=self._is_scaled)
