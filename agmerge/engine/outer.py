"""Step with what several local steps of all workers came to: outer optimizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Nesterov:
    """Ask for an outer step with Nesterov's momentum: pass it as ``outer=``.

    With U the mean of what workers have done since the last exchange, ``M = momentum * M + U`` and
    ``shared -= lr * (U + momentum * M)``. It is the outer optimizer of Douillard et al., "DiLoCo: Distributed
    Low-Communication Training of Language Models", 2023, Algorithm 1, with their values.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"Nesterov: lr must be > 0, not {self.lr!r}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"Nesterov: momentum must lie in [0, 1), not {self.momentum!r}")

    def __call__(self, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        """Return the optimizer that makes such steps of ``parameters``."""
        return NesterovStep(parameters, self.lr, self.momentum)


class NesterovStep(torch.optim.Optimizer):
    """Make the steps of :class:`Nesterov`. Every product is rounded by itself: all processors come to the same bits."""

    def __init__(self, parameters: list[torch.Tensor], lr: float, momentum: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step with ``p.grad``, the combined ways; a parameter without one stays. ``closure``: not called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"].mul_(group["momentum"]).add_(parameter.grad)
                way = (momentum * group["momentum"]).add_(parameter.grad)
                parameter.sub_(way.mul_(group["lr"]))
