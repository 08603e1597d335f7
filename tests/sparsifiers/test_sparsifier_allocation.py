# SPDX-License-Identifier: Apache-2.0
"""Selecting on the CPU allocates in the size of k, not in the size of the vector."""

from __future__ import annotations

from collections.abc import Callable

from support.allocation import QUARTER, N, numpy_peak, torch_largest
from torch import Tensor

import sparsifiers


def test_topk_allocates_no_quarter_of_the_vector(distribution: str, draw: Callable[..., Tensor]) -> None:
    vector = draw(distribution, N)
    topk = sparsifiers.get("topk", 0.01)
    assert numpy_peak(lambda: topk.select(vector)) < QUARTER
    assert torch_largest(lambda: topk.select(vector)) < QUARTER


def test_the_gauges_see_a_temporary(draw: Callable[..., Tensor]) -> None:
    vector = draw("gaussian", N)
    array = vector.numpy()
    assert numpy_peak(lambda: abs(array)) >= 4 * N
    assert torch_largest(lambda: vector.abs()) >= 4 * N
