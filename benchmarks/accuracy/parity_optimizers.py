# SPDX-License-Identifier: Apache-2.0
"""The optimizers of ``parity.py``, as a script would make them, with learning rates that are about dense's best.

What torch has not is written out: Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, Algorithm
2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

# By optimizer: learning rate and weight decay on "lm". Of {1/2, 1, 2} times another one these had the least loss after
# 400 steps of a dense exchange.
ON_LM: dict[str, tuple[float, float]] = {
    "adamw": (3e-3, 1e-2),
    "sgd": (0.1, 0.0),
    "sgd-decay": (0.1, 5e-4),
    "lion": (1e-3, 1e-1),
    "muon": (4e-2, 0.0),
    "adafactor": (4e-2, 0.0),
    "nadam": (2e-3, 0.0),
    "radam": (6e-3, 0.0),
    "rmsprop": (1e-3, 0.0),
    "adagrad": (1e-2, 0.0),
    "adamax": (4e-3, 0.0),
}
BESIDE_MUON = 0.15  # times its learning rate: AdamW's, of what is no matrix of a layer


class Lion(torch.optim.Optimizer):
    """An optimizer that steps by the sign of a mean of gradients."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step once."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                first, second = group["betas"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(torch.sign(torch.lerp(parameter.grad, mean, first)), alpha=-group["lr"])
                mean.lerp_(parameter.grad, 1 - second)


def _muon(model: nn.Module, lr: float, decay: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of layers, and AdamW for embeddings, the head and vectors."""
    apart = ("wte", "wpe", "lm_head")
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.dim() == 2 and not any(word in name for word in apart)]
    known = set(map(id, matrices))
    others = [p for _, p in named if id(p) not in known]
    return [
        torch.optim.Muon(matrices, lr=lr, momentum=0.95, weight_decay=decay),
        torch.optim.AdamW(others, lr=BESIDE_MUON * lr, weight_decay=1e-2),
    ]


MAKE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "lion": Lion,
    "adafactor": torch.optim.Adafactor,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adamax": torch.optim.Adamax,
}


def made(name: str, model: nn.Module, lr: float, decay: float) -> list[torch.optim.Optimizer]:
    """Return the optimizers of this name for a model: one, but Muon, which has another one beside it."""
    if name == "muon":
        return _muon(model, lr, decay)
    if name.startswith("sgd"):
        return [torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=decay)]
    return [MAKE[name](model.parameters(), lr=lr, weight_decay=decay)]
