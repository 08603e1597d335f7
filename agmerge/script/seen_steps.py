# SPDX-License-Identifier: Apache-2.0
"""Steps of the torch optimizers of a process that have certain parameters, whichever object the script calls.

An optimizer may step inside another one (Lookahead, SAM), a scaler or a framework. torch runs global hooks around each
of these steps.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch._compile import _disable_dynamo
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class StepListener(Protocol):
    """Listener to steps of optimizers that have some of its parameters."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """React before a step, after its closure. May raise."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """React after a step."""


class _Subscription:
    """Parameters of one listener, which is held weakly, and the optimizers that have some of them."""

    def __init__(self, listener: StepListener, parameters: Iterable[torch.Tensor]) -> None:
        self.listener = weakref.ref(listener)
        self._parameters = {id(parameter) for parameter in parameters}
        self._known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether ``optimizer`` has one of the parameters."""
        if optimizer in self._known:
            return True
        for group in optimizer.param_groups:
            if any(id(parameter) in self._parameters for parameter in group["params"]):
                self._known.add(optimizer)
                return True
        return False


_subscriptions: tuple[_Subscription, ...] = ()  # replaced, never changed: other threads may be in a step
_lock = threading.Lock()
_is_hooked = False  # torch's global hooks are registered, once for all listeners


def listen(listener: StepListener, parameters: Iterable[torch.Tensor]) -> Callable[[], None]:
    """Notify ``listener`` of the steps of all torch optimizers with some of ``parameters``; return what ends it.

    The listener is held weakly, and keeps the parameters alive.
    """
    global _subscriptions, _is_hooked
    subscription = _Subscription(listener, parameters)
    with _lock:
        if not _is_hooked:
            register_optimizer_step_pre_hook(_before)
            register_optimizer_step_post_hook(_after)
            _is_hooked = True
        _subscriptions = (*_living(), subscription)

    def end() -> None:
        global _subscriptions
        with _lock:
            _subscriptions = tuple(one for one in _living() if one is not subscription)

    return end


def _living() -> list[_Subscription]:
    return [one for one in _subscriptions if one.listener() is not None]


def _listeners(optimizer: torch.optim.Optimizer) -> list[StepListener]:
    listeners = [one.listener() for one in _subscriptions if one.concerns(optimizer)]
    return [listener for listener in listeners if listener is not None]


@_disable_dynamo
def _before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    listeners = _listeners(optimizer) if _subscriptions else []
    if not listeners:
        return None

    def look() -> None:
        for listener in listeners:
            listener.before_step(optimizer)

    return after_closure(look, args, kwargs)


@_disable_dynamo
def _after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for listener in _listeners(optimizer) if _subscriptions else ():
        listener.after_step(optimizer)


OWN = (_before, _after)  # which do nothing for optimizers of other parameters


def after_closure(look: Callable[[], None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``look`` now, or after a step's closure, in which frameworks clip; return new arguments then, else None."""
    optimizer, *given = args  # a closure is the first argument, or has its name
    closure = given[0] if given else kwargs.get("closure")
    if not callable(closure):
        look()
        return None

    def looked() -> Any:
        loss = closure()
        look()
        return loss

    return ((optimizer, looked, *given[1:]), kwargs) if given else (args, {**kwargs, "closure": looked})
