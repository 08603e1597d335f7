# SPDX-License-Identifier: Apache-2.0
"""Outer optimizers: steps of the shared parameters with the workers' averaged updates as gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Nesterov:
    """Outer optimizer with Nesterov momentum, for ``outer=``, as in DiLoCo.

    With U as the average of the workers' updates since the last exchange, ``M = momentum * M + U`` and ``shared -= lr *
    (U + momentum * M)``. The defaults are those of Douillard et al., "DiLoCo: Distributed Low-Communication Training of
    Language Models", 2023, Algorithm 1.

    Args:
        lr (float): Learning rate, above 0. Default: 0.7. With 1.0 and ``momentum=0`` the average is applied as it is.
        momentum (float): At least 0 and below 1. Default: 0.9.

    Raises:
        ValueError: For other values.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"Nesterov: lr must be > 0, got {self.lr!r}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"Nesterov: momentum must be in [0, 1), got {self.momentum!r}")

    def __call__(self, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        """Return an optimizer of ``parameters`` that makes these steps."""
        return NesterovStep(parameters, self.lr, self.momentum)


class NesterovStep(torch.optim.Optimizer):
    """Optimizer that makes the steps of :class:`Nesterov`.

    Every product is rounded by itself, equally on all processors.
    """

    def __init__(self, parameters: list[torch.Tensor], lr: float, momentum: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step with ``p.grad``, the combined pseudo-gradients; a parameter without one stays.

        ``closure``: not called.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"].mul_(group["momentum"]).add_(parameter.grad)
                looking_ahead = (momentum * group["momentum"]).add_(parameter.grad)
                parameter.sub_(looking_ahead.mul_(group["lr"]))


@dataclass(frozen=True)
class ScriptsOuter:
    """Outer step by an optimizer that the script has made of its parameters: pass it as ``outer=``.

    The script's own object steps, with its groups, schedulers, hooks and state. ``of``: that object.
    """

    of: torch.optim.Optimizer

    def __call__(self, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        """Return another one of the same class and defaults: for shards, which are not in the script's own."""
        return type(self.of)(parameters, **self.of.defaults)

    def bind(self, base: dict[str, torch.Tensor], parameters: dict[str, torch.Tensor]) -> torch.optim.Optimizer:
        """Return an optimizer that makes the script's own step ``base``.

        ``parameters``: the script's, by the same names.
        """
        own = {parameter for group in self.of.param_groups for parameter in group["params"]}
        if not all(parameter in own for parameter in parameters.values()):
            return self(list(base.values()))
        return BoundOuter(self.of, base, parameters)

    def __repr__(self) -> str:
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.of.param_groups]
        return f"{type(self.of).__name__}({groups})"


class BoundOuter(torch.optim.Optimizer):
    """Optimizer of shared parameters by one of a worker's own: during its step, these have the shared values."""

    def __init__(
        self, of: torch.optim.Optimizer, base: dict[str, torch.Tensor], parameters: dict[str, torch.Tensor]
    ) -> None:
        # Not super().__init__(): groups, state and hooks are the script's.
        self._of, self._base, self._parameters = of, base, parameters

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Return the script's own state, by its parameters."""
        return self._of.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """Return the script's own groups."""
        return self._of.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step with the gradients of the shared parameters; one without stays. ``closure``: not called."""
        kept = [(p, p.data, p.grad) for p in self._parameters.values()]
        try:
            for name, parameter in self._parameters.items():
                parameter.grad = None  # a gradient has to have the dtype of the parameter's data
                parameter.data = self._base[name]
                parameter.grad = self._base[name].grad
            self._of.step()
        finally:
            for parameter, data, gradient in kept:
                parameter.grad = None
                parameter.data, parameter.grad = data, gradient

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the script's optimizer."""
        return self._of.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state into the script's optimizer."""
        self._of.load_state_dict(state_dict)
