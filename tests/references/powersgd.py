# SPDX-License-Identifier: Apache-2.0
"""PowerSGD: Vogels, Karimireddy and Jaggi, NeurIPS 2019 (arXiv 1905.13727), Algorithms 1 and 2.

A gradient of shape (n, m) is sent as two thin factors, P of shape (n, r) and Q of shape (m, r). Each step makes one
turn of a power iteration that starts from the Q of the step before (warm start).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def mean(of_ranks: Sequence[Tensor]) -> Tensor:
    """Return what an all-reduce gives every rank."""
    return torch.stack(list(of_ranks)).mean(0)


class PowerSGD:
    """All ranks of PowerSGD for one matrix."""

    def __init__(self, ranks: int, q: Tensor) -> None:
        """Begin with any ``q``, (m, r), that all ranks have in common."""
        self.q = q
        self.errors = [q.new_zeros(())] * ranks  # e_w = 0, which broadcasts

    def step(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the update of one step, (n, m), from each rank's gradient."""
        deltas = [g + e for g, e in zip(gradients, self.errors, strict=True)]  # Alg. 2: Delta_w = g_w + e_w
        p = mean([delta @ self.q for delta in deltas])  # Alg. 1: P = M Q, all-reduce mean
        self.p = p = torch.linalg.qr(p).Q  # Alg. 1: orthogonalize(P)
        qs = [delta.T @ p for delta in deltas]  # Alg. 1: Q = M^T P
        self.errors = [d - p @ q.T for d, q in zip(deltas, qs, strict=True)]  # Alg. 2: e_w = Delta_w - P Q_w^T
        self.q = mean(qs)  # Alg. 1: all-reduce mean; the next step starts here
        return p @ self.q.T  # Alg. 1: decompress


class EFSGD(torch.optim.Optimizer):
    """The last two lines of Algorithm 2: momentum of what was decompressed, which is the same on all ranks."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, momentum: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply the updates that stand in ``p.grad``."""
        for group in self.param_groups:
            for x in group["params"]:
                m = self.state[x].setdefault("m", torch.zeros_like(x))
                m.mul_(group["momentum"]).add_(x.grad)  # m = lambda m + Delta
                x.sub_(group["lr"] * (x.grad + m))  # x = x - gamma (Delta + m)
