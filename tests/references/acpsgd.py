# SPDX-License-Identifier: Apache-2.0
"""ACP-SGD: Zhang, Zhang, Shi, Chu and Li, ICDCS 2023, Algorithm 1: one factor a step, the left and the right by turns.

The first step sends both, as PowerSGD does: a basis that was drawn knows nothing of the gradient. That is the library's
addition.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from references.powersgd import PowerSGD, mean


class ACPSGD:
    """All ranks of ACP-SGD for one matrix, (n, m)."""

    def __init__(self, ranks: int, q: Tensor, keeps_left: bool = False) -> None:
        """Begin with any ``q``, (m, r), that all ranks have in common. ``keeps_left``: of the first step's factors."""
        self.first, self.keeps_left = PowerSGD(ranks, q), keeps_left
        self.basis: Tensor | None = None  # orthonormal columns: of the left factor (n, r), or of the right one (m, r)
        self.errors: list[Tensor] = []

    def step(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the update of one step, (n, m), from each rank's gradient."""
        if self.basis is None:
            update = self.first.step(gradients)
            self.errors, self.is_left = self.first.errors, self.keeps_left
            self.basis = torch.linalg.qr(self.first.p if self.is_left else self.first.q).Q
            return update
        basis, left = self.basis, self.is_left
        deltas = [g + e for g, e in zip(gradients, self.errors, strict=True)]  # M_w = g_w + e_w
        factors = [d.T @ basis if left else d @ basis for d in deltas]  # Q_w = M_w^T P, or P_w = M_w Q
        products = [basis @ f.T if left else f @ basis.T for f in factors]  # P Q_w^T, or P_w Q^T
        self.errors = [d - product for d, product in zip(deltas, products, strict=True)]
        self.basis, self.is_left = torch.linalg.qr(mean(factors)).Q, not left  # the next step's basis
        return mean(products)
