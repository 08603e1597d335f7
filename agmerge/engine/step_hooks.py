"""Follow an optimizer that somebody else steps: what ``sync="updates"`` does around a step hangs on hooks of its."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from agmerge.engine.own_step import not_finite
from agmerge.engine.update_reducer import UpdateReducer


@contextmanager
def followed(reducer: UpdateReducer, check: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Exchange, inside, what the optimizer of ``reducer`` does whenever it steps. Each step is then collective.

    The optimizer itself stays what it is, for whoever holds it: schedulers, frameworks, checkpoints. A step with a
    gradient that is not finite moves nothing: the optimizer finds no gradients then. ``check`` is called before each
    step, and raises where there should be none.
    """
    optimizer, left_out = reducer.members.optimizer, _LeftOut()

    def look() -> None:
        left_out.take(optimizer, not_finite(reducer.members))

    def before(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        check()
        reducer.before_step()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            look()
            return args, kwargs

        def closure_then_look() -> Any:  # there are no gradients before
            loss = closure()
            look()
            return loss

        return (args[0],), {**kwargs, "closure": closure_then_look}

    def after(*_: object) -> None:
        bad = left_out.give_back()
        reducer.count_step(not bad, bad, scaled=False)
        reducer.after_step()

    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _LeftOut:
    """Hold the gradients of a step that shall come to nothing."""

    def __init__(self) -> None:
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # by parameter
        self._bad: tuple[str, ...] = ()  # names of parameters whose gradients are not finite

    def take(self, optimizer: torch.optim.Optimizer, bad: tuple[str, ...]) -> None:
        """Take all gradients away from ``optimizer`` if some are ``bad``."""
        self._bad = bad
        parameters = [p for group in optimizer.param_groups for p in group["params"]] if bad else []
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None

    def give_back(self) -> tuple[str, ...]:
        """Put the gradients back where they were; return the names of the bad ones."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients = []
        return self._bad
