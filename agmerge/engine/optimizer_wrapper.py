# SPDX-License-Identifier: Apache-2.0
"""Wrapper of an optimizer by composition: the inner optimizer keeps all that is its own."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from agmerge.tensors.parameters import optimizers_of

OF_SCALER = ("grad_scale", "found_inf")  # attributes that a GradScaler sets of an optimizer that takes a scale
SEVERAL = "there are several optimizers ({}). Use optimizer.optimizers, the list of them."


def _registering(name: str) -> Any:
    """Return torch's method ``name`` of a wrapper, which registers a hook with the inner optimizer."""

    @functools.wraps(getattr(torch.optim.Optimizer, name))
    def register(self: OptimizerWrapper, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._inner, name)(*args, **kwargs)

    return register


class OptimizerHolder:
    """Holder of the optimizer that the script gave, or of a group that stands for several."""

    _inner: torch.optim.Optimizer | None  # None: it is not known which one steps

    @property
    def optimizer(self) -> Any:
        """Return the plain optimizer that you passed. Raises ``AttributeError`` if you passed several."""
        if self._inner is not None and len(optimizers_of(self._inner)) > 1:
            raise AttributeError(SEVERAL.format(type(self._inner).__name__))
        return getattr(self._inner, "given", self._inner)  # of one that stands for an object of another library

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the list of the plain optimizers that you passed, in their order."""
        inner: Any = self._inner
        return [] if inner is None else getattr(inner, "optimizers", [inner])


class OptimizerWrapper(OptimizerHolder, torch.optim.Optimizer):
    """Optimizer around another one, with the groups, state, defaults, hooks and unknown attributes of that.

    Subclasses set ``_inner`` and do not call ``super().__init__()``, which would make other groups and hooks.
    Attributes of their own have a name with an underscore. Other attributes that are set here become the inner
    optimizer's, or that of each of several, except ``step`` and other methods, which schedulers replace.
    """

    _inner: torch.optim.Optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the inner optimizer's own list."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._only("param_groups").param_groups = groups

    @property
    def state(self) -> Any:
        """Return the inner optimizer's own state."""
        return self._inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self._only("state").state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """Return the inner optimizer's own defaults."""
        return self._inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self._only("defaults").defaults = defaults

    def _only(self, name: str) -> torch.optim.Optimizer:
        """Return the one inner optimizer, to set its attribute ``name``; ``AttributeError`` where there are several."""
        if len(optimizers_of(self._inner)) > 1:
            raise AttributeError(f"{name} of one of them can be set: {SEVERAL.format(type(self._inner).__name__)}")
        return self._inner

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # not set up yet: while unpickling
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name in OF_SCALER or hasattr(type(self), name) or "_inner" not in vars(self):
            super().__setattr__(name, value)
            return
        for optimizer in optimizers_of(self._inner):
            setattr(optimizer, name, value)

    def __delattr__(self, name: str) -> None:
        if name in vars(self) or name == "_inner":
            super().__delattr__(name)
            return
        for optimizer in optimizers_of(self._inner):
            delattr(optimizer, name)

    # Hooks around a step run once, those before it after the gradients have been combined. They get the inner
    # optimizer, and where there are several one that stands for all of them.
    register_step_pre_hook = _registering("register_step_pre_hook")
    register_step_post_hook = _registering("register_step_post_hook")
    register_state_dict_pre_hook = _registering("register_state_dict_pre_hook")
    register_state_dict_post_hook = _registering("register_state_dict_post_hook")
    register_load_state_dict_pre_hook = _registering("register_load_state_dict_pre_hook")
    register_load_state_dict_post_hook = _registering("register_load_state_dict_post_hook")


# Modules of optimizers that exchange gradients by themselves, and the advice for each.
OF_OTHERS = {
    "deepspeed.runtime": (
        "DeepSpeed averages gradients in its own engine. With ZeRO stage 0, remove DeepSpeed and use "
        "DistributedOptimizer or DistributedDataParallel. Otherwise keep DeepSpeed's exchange"
    ),
    "torchft": (
        "torchft averages gradients in its own manager. Wrap the plain optimizer and remove torchft, or keep "
        "torchft's exchange (agmerge.LocalSync replaces its DiLoCo)"
    ),
}


def refuse_exchanging(optimizer: Any) -> None:
    """Raise ``TypeError`` for a wrapper around an optimizer, and for one that exchanges gradients itself."""
    if isinstance(optimizer, OptimizerWrapper):
        raise TypeError("optimizer is already a DistributedOptimizer. Wrap the plain optimizer, once.")
    for kind in type(optimizer).__mro__:
        for module, advice in OF_OTHERS.items():
            if f"{kind.__module__}.".startswith(f"{module}."):
                raise TypeError(
                    f"optimizer: a {type(optimizer).__name__} of {module.partition('.')[0]} is not supported: {advice}"
                )


def check_optimizer(optimizer: Any) -> None:
    """Raise unless ``optimizer`` can be wrapped.

    ``TypeError`` for anything but an optimizer, for a wrapper around one and for one that exchanges gradients itself,
    ``ValueError`` if it needs closures.
    """
    refuse_exchanging(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if isinstance(optimizer, torch.optim.LBFGS) or (closure and closure.default is inspect.Parameter.empty):
        raise ValueError(
            f"{type(optimizer).__name__} is not supported, because its step() calls a closure several times and "
            "agmerge cannot average gradients between the calls. Use an optimizer whose step() needs no closure."
        )
