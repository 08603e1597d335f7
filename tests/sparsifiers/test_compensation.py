# SPDX-License-Identifier: Apache-2.0
"""Which formula a memory has, what kernels compute of it, and what is left to a script's own code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import sparsifiers
from sparsifiers import Memory, Rate
from sparsifiers.gpu import Scratch
from sparsifiers.memories import SUM, Decaying, DGCMemory, Formula, HandBack, NoMemory, Residual, ResidualGTopK

OPTIMIZERS = [Rate(0.5, True), Rate(0.5, True)]  # what the optimizer says of two tensors


class Own(Residual):
    """A script's."""

    def _compensate(self, work: Tensor, *others: object) -> None:  # type: ignore[override]
        work.zero_()


class OwnMask(DGCMemory):
    """A script's."""

    def mask(self, momentum: Tensor, indices: Tensor, sent: Tensor) -> None:
        momentum.zero_()


class OwnFormula(Residual):
    """A script's."""

    def formula(self, rate: Rate | None = None) -> Formula:
        return Formula(0.5)


@pytest.mark.parametrize(
    "memory, rates, formula, has_kernel",
    [
        (Residual(), OPTIMIZERS, SUM, True),
        (ResidualGTopK(), OPTIMIZERS, SUM, True),
        (NoMemory(), OPTIMIZERS, SUM, True),
        (HandBack(), OPTIMIZERS, SUM, True),
        (Decaying(0.9), OPTIMIZERS, Formula(0.9), False),
        (Decaying(1.0), OPTIMIZERS, SUM, True),
        (Own(), OPTIMIZERS, None, False),
        (OwnFormula(), OPTIMIZERS, Formula(0.5), False),
        (DGCMemory(), OPTIMIZERS, Formula(rate=Rate(0.5, True), masks=True), True),
        (DGCMemory(momentum=0.7), [None, None], Formula(rate=Rate(0.7), masks=True), True),
        (DGCMemory(), [None], Formula(rate=Rate(0.9), masks=True), True),
        (DGCMemory(), [Rate(0.5), Rate(0.6)], None, False),
        (DGCMemory(clipping=1.0), OPTIMIZERS, Formula(rate=Rate(0.5, True), masks=True, clipping=1.0), False),
        (DGCMemory(masking=False), OPTIMIZERS, Formula(rate=Rate(0.5, True)), True),
        (DGCMemory().for_dense_tensors(has_residual=True), OPTIMIZERS, SUM, True),
        (DGCMemory().for_dense_tensors(has_residual=False), OPTIMIZERS, SUM, True),
        (OwnMask(), OPTIMIZERS, None, False),
    ],
)
def test_what_kernels_compute(
    memory: Memory, rates: list[Rate | None], formula: Formula | None, has_kernel: bool
) -> None:
    assert memory.one_formula(rates) == formula
    assert (formula is not None and formula.has_kernel) is has_kernel


def test_a_scratch_of_another_vector_is_refused() -> None:
    with pytest.raises(ValueError, match="topk.*: the scratch has 8 elements, but the vector has 9"):
        sparsifiers.get("topk").select(torch.zeros(9), scratch=Scratch(8, torch.device("cpu")))
