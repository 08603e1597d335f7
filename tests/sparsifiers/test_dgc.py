# SPDX-License-Identifier: Apache-2.0
"""dgc: exactly top-k by way of a sample; the authors' factor loop ends and keeps within 0.8 k and k."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

import sparsifiers
from sparsifiers import dgc, largest
from sparsifiers.base import Request

pytestmark = pytest.mark.usefixtures("one_thread")

Draw = Callable[..., Tensor]
Ranked = Callable[[Tensor], np.ndarray]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_exact_is_topk(distribution: str, dtype: torch.dtype, draw: Draw, ranked: Ranked) -> None:
    for n in (1, 31, 1000, 70_000):
        vector = draw(distribution, n, dtype)
        order = ranked(vector)
        for k in sorted({1, max(1, n // 1000), max(1, n // 100), max(1, n // 2), n}):
            sparsifier = sparsifiers.get("dgc")
            selection = sparsifier.select(vector, k=k)
            assert selection.count == k
            assert np.array_equal(selection.indices.numpy(), np.sort(order[:k])), (n, k)
            assert isinstance(sparsifier, dgc.DGC)
            on_device = sparsifier._select_on_device(vector, Request(k, "", 0, ((n,),)))
            assert np.array_equal(on_device.indices.numpy(), np.sort(order[:k])), (n, k)


@pytest.mark.parametrize("mode", ["exact", "paper"])
def test_the_margin_makes_a_second_pass_rare(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fallback = Mock(wraps=largest.largest_magnitudes)
    monkeypatch.setattr(dgc, "largest_magnitudes", fallback)
    vector = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    short = 0
    for step in range(200):
        short += int(sparsifiers.get("dgc", mode=mode).select(vector, step=step).count) < 2000
    assert fallback.call_count <= 1
    assert short == 0 if mode == "exact" else short > 20  # without a margin half the samples are short


def test_the_sample_and_its_rank() -> None:
    assert dgc.sample_rank(1000, 0.01, margin=False) == 10
    assert dgc.sample_rank(1000, 0.01, margin=True) == 24  # ceil(10 + 4 sqrt(10) + 1)
    assert dgc.sample_rank(50, 0.9, margin=True) == 50
    keys = torch.tensor([3, 9, 1, 9, 5])
    assert [int(dgc.ranked(keys, rank)) for rank in (1, 2, 3, 5)] == [9, 9, 5, 1]


def test_the_factor_loop(distribution: str, draw: Draw, ranked: Ranked) -> None:
    for n in (1, 31, 1000, 70_000):
        vector = draw(distribution, n)
        order, nonzero = ranked(vector), int(vector.count_nonzero())
        for k in sorted({1, max(1, n // 100), max(1, n // 2), n}):
            sparsifier = dgc.DGC(mode="paper")
            host = sparsifier.select(vector, k=k)
            device = sparsifier._select_on_device(vector, Request(k, "", 0, ((n,),)))
            assert isinstance(device.count, Tensor)
            for selection in (host, device):
                chosen = selection.trimmed().numpy()
                assert 0.8 * min(k, nonzero) <= len(chosen) <= k, (n, k)
                assert selection.indices.shape == (k,)
                magnitudes = vector.abs().double().numpy()
                assert magnitudes[chosen].sum() >= 0.999 * magnitudes[order[: len(chosen)]].sum()


@pytest.mark.parametrize("mode", ["exact", "paper"])
def test_a_threshold_of_zero_does_not_send_everything(mode: str) -> None:
    vector = torch.zeros(1_000_000)
    vector[::200] = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    selection = sparsifiers.get("dgc", mode=mode).select(vector)
    assert int(selection.count) <= 10_000
    assert set(range(0, 1_000_000, 200)) <= set(selection.trimmed().tolist())


def test_options() -> None:
    assert repr(sparsifiers.get("dgc", 0.5)) == "dgc(density=0.5, mode='exact', sample_ratio=0.01)"
    for wrong in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"dgc: sample_ratio must be in \(0, 1\]"):
            sparsifiers.get("dgc", sample_ratio=wrong)
    with pytest.raises(TypeError, match="dgc: sample_ratio must be a number, got None"):
        sparsifiers.get("dgc", sample_ratio=None)
    with pytest.raises(ValueError, match="dgc: mode must be 'exact' or 'paper', got 'fast'"):
        sparsifiers.get("dgc", mode="fast")
