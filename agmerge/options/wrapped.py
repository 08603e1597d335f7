"""Which optimizers can be wrapped."""

from __future__ import annotations

import inspect
from typing import Any

import torch


def check_optimizer(optimizer: Any, wrapper: type) -> None:
    """Raise ``TypeError`` for no optimizer and for a ``wrapper`` around one, ``ValueError`` if it needs closures."""
    if isinstance(optimizer, wrapper):
        raise TypeError("this optimizer is a DistributedOptimizer already; wrap the plain one, once")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if isinstance(optimizer, torch.optim.LBFGS) or (closure and closure.default is inspect.Parameter.empty):
        raise ValueError(
            f"{type(optimizer).__name__} calls a closure by itself, several times a step; its gradients cannot be "
            "combined between the calls. Use an optimizer whose step() needs no closure"
        )
