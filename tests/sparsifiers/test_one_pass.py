"""Which memories kernels take over, and which they leave alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import sparsifiers
from sparsifiers import Rate
from sparsifiers.dgc_memory import DGCMemory
from sparsifiers.gpu import Scratch
from sparsifiers.memories import Decaying, HandBack, Memory, NoMemory, Residual, ResidualGTopK
from sparsifiers.one_pass import OnePass, clears_momentum, one_pass

OPTIMIZERS = [Rate(0.5, True), Rate(0.5, True)]  # what the optimizer says of two tensors


class Own(Residual):
    """A script's."""

    def _compensate(self, work: Tensor, *others: object) -> None:  # type: ignore[override]
        work.zero_()


class OwnMask(DGCMemory):
    """A script's."""

    def mask(self, momentum: Tensor, indices: Tensor, sent: Tensor) -> None:
        momentum.zero_()


@pytest.mark.parametrize(
    "memory, rates, rule, clears",
    [
        (Residual(), OPTIMIZERS, OnePass(None), False),
        (ResidualGTopK(), OPTIMIZERS, OnePass(None), False),
        (NoMemory(), OPTIMIZERS, OnePass(None), False),
        (HandBack(), OPTIMIZERS, OnePass(None), False),
        (Decaying(0.9), OPTIMIZERS, None, False),
        (Own(), OPTIMIZERS, None, False),
        (DGCMemory(), OPTIMIZERS, OnePass(Rate(0.5, True)), True),
        (DGCMemory(momentum=0.7), [None, None], OnePass(Rate(0.7, False)), True),
        (DGCMemory(), [None], OnePass(Rate(0.9, False)), True),
        (DGCMemory(), [Rate(0.5), Rate(0.6)], None, True),
        (DGCMemory(clipping=1.0), OPTIMIZERS, None, True),
        (DGCMemory(masking=False), OPTIMIZERS, OnePass(Rate(0.5, True)), False),
        (DGCMemory().for_dense_lane(has_residual=True), OPTIMIZERS, OnePass(None), False),
        (OwnMask(), OPTIMIZERS, OnePass(Rate(0.5, True)), None),
    ],
)
def test_what_kernels_know(memory: Memory, rates: list[Rate | None], rule: OnePass | None, clears: bool | None) -> None:
    assert one_pass(memory, rates) == rule
    assert clears_momentum(memory) is clears


def test_a_scratch_of_another_vector_is_refused() -> None:
    with pytest.raises(ValueError, match="topk.*: the scratch is of 8 elements, but the vector has 9"):
        sparsifiers.get("topk").select(torch.zeros(9), scratch=Scratch(8, torch.device("cpu")))
