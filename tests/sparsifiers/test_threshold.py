# SPDX-License-Identifier: Apache-2.0
"""threshold: the fixed one is only bounded by k, the one that follows k keeps within 0.8 k and k."""

from __future__ import annotations

import math
from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

import sparsifiers
from sparsifiers import largest
from sparsifiers.base import Request
from sparsifiers.papers.threshold import Threshold

Draw = Callable[..., Tensor]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("on_device", [False, True])
def test_a_given_tau_sends_what_reaches_it_and_at_most_k(dtype: torch.dtype, on_device: bool) -> None:
    vector = torch.tensor([0.5, -2.0, 0.0, 1.0, 3.0, float("nan"), -1.0, 1e-3], dtype=dtype)
    asked = Request(4, "", 0, ((8,),))
    for tau, expected in (
        (2.5, [4, 5]),
        (2.0, [1, 4, 5]),
        (1.0, [1, 3, 4, 5]),  # the later of the two 1.0 is one too many
        (1e-9, [1, 3, 4, 5]),
        (1e30, [5]),
    ):
        threshold = Threshold(tau=tau)
        selection = threshold._select_on_device(vector, asked) if on_device else threshold.select(vector, k=4)
        assert selection.trimmed().tolist() == expected, tau
        assert selection.indices.shape == (4,)
        assert ((selection.indices >= 0) & (selection.indices < 8)).all()
        assert isinstance(selection.count, Tensor) is on_device
    assert Threshold(tau=4.0).select(vector[:5], k=2).count == 0


def test_an_element_between_tau_and_its_rounding_is_not_sent() -> None:
    tau = 1.0 + 2.0**-12
    vector = torch.tensor([1.0, 1.0 + 2.0**-10], dtype=torch.float16)
    assert sparsifiers.get("threshold", tau=tau).select(vector, k=2).trimmed().tolist() == [1]


@pytest.mark.parametrize("drift", [0.0, 0.005, 0.05])
@pytest.mark.parametrize("tail", [1.0, 2.0])
def test_tau_follows_k_under_error_feedback(drift: float, tail: float) -> None:
    rng = np.random.default_rng(0)
    n, k, steps = 20_000, 200, 120
    residual, exactly = np.zeros(n), 0
    threshold = sparsifiers.get("threshold")
    real = largest.largest_magnitudes
    with patch.object(largest, "largest_magnitudes", wraps=real) as selected_exactly:
        for step in range(steps):
            gradient = rng.standard_normal(n)
            residual += math.exp(drift * step) * np.sign(gradient) * np.abs(gradient) ** tail
            chosen = threshold.select(torch.from_numpy(residual), key="w", step=step).trimmed().numpy()
            assert 0.8 * k <= len(chosen) <= k
            assert np.abs(residual[chosen]).min() >= np.delete(np.abs(residual), chosen).max()
            residual[chosen] = 0.0
        exactly = selected_exactly.call_count
    assert exactly <= (0.15 if drift < 0.05 else 0.3) * steps + 10


def test_k_may_change_from_call_to_call(draw: Draw) -> None:
    vector = draw("gaussian", 50_000)
    threshold = sparsifiers.get("threshold")
    for k in (12_500, 3125, 500, 50, 1, 40_000, 50_000):
        assert 0.8 * k <= int(threshold.select(vector, k=k, key="w").count) <= k


def test_on_a_device_it_starts_from_the_last_threshold(draw: Draw) -> None:
    vector = draw("gaussian", 50_000)
    asked = Request(500, "w", 0, ((50_000,),))
    threshold = Threshold()
    for factor, slack in ((1.0, 2e-3), (1.02, 2e-6), (30.0, 2e-3), (1e-3, 2e-3)):  # small after a good start
        chosen = threshold._select_on_device(vector * factor, asked).trimmed()
        assert len(chosen) == 500
        magnitudes = vector.abs()
        assert magnitudes[chosen].min() >= (1 - slack) * magnitudes.topk(500).values[-1]
        kept = threshold.state_dict()["threshold"]["w"]  # type: ignore[index]
        kth = float((vector * factor).abs().topk(500).values[-1])
        assert kept[0] == 50_000
        assert kept[1] == pytest.approx(kth, rel=2e-3)
        assert type(kept[1]) is float


def test_options() -> None:
    assert repr(sparsifiers.get("threshold", 0.5)) == "threshold(density=0.5, tau=None)"
    assert repr(sparsifiers.get("threshold", 0.5, tau=2)) == "threshold(density=0.5, tau=2.0)"
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="tau must be finite and above 0, or None to follow k"):
            sparsifiers.get("threshold", tau=wrong)
    for wrong_type in ("1", True, torch.tensor(1.0)):
        with pytest.raises(TypeError, match="threshold: tau must be a number"):
            sparsifiers.get("threshold", tau=wrong_type)
