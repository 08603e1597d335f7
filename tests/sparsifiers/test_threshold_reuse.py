# SPDX-License-Identifier: Apache-2.0
"""A threshold is reused while its count fits, whatever error feedback does to the vector in between."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparsifiers import estimated, largest
from sparsifiers.estimated import reuse_threshold
from sparsifiers.largest import bit_view, key_from, magnitude_mask, value_of

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def ramp(n: int = 1000) -> Tensor:
    """Magnitudes 1, 2, ..., n in an order without pattern, of both signs."""
    order = np.random.default_rng(0).permutation(n)
    return torch.from_numpy((order + 1.0) * np.where(order % 2, 1.0, -1.0)).float()


def indices_of_largest(vector: Tensor, k: int) -> list[int]:
    return sorted(vector.abs().argsort(descending=True, stable=True)[:k].tolist())


def test_a_cold_start_is_exact() -> None:
    found = reuse_threshold(ramp(), 100, None)
    assert found.exact
    assert found.threshold == 901.0
    assert found.indices.dtype == np.int32
    assert found.indices.tolist() == indices_of_largest(ramp(), 100)


@pytest.mark.parametrize("count", [80, 81, 99, 100, 101, 125])
def test_a_count_that_fits_is_accepted(count: int) -> None:
    found = reuse_threshold(ramp(), 100, 1000.5 - count)
    assert not found.exact
    assert found.indices.tolist() == indices_of_largest(ramp(), min(count, 100))
    assert found.threshold == pytest.approx((1000.5 - count) * (count / 100) ** 0.1, rel=1e-12)


@pytest.mark.parametrize("count", [0, 1, 79, 126, 999, 1000])
def test_any_other_count_is_answered_exactly(count: int) -> None:
    found = reuse_threshold(ramp(), 100, 1000.5 - count)
    assert found.exact
    assert found.threshold == 901.0
    assert found.indices.tolist() == indices_of_largest(ramp(), 100)


def test_an_element_at_the_threshold_counts() -> None:
    assert len(reuse_threshold(ramp(), 100, 911.0).indices) == 90
    assert len(reuse_threshold(ramp(), 100, np.nextafter(911.0, 912.0)).indices) == 89


def test_both_signs_are_sent() -> None:
    vector = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    found = reuse_threshold(vector, 1000, reuse_threshold(vector, 1000, None).threshold)
    assert not found.exact
    assert 400 < int((vector[torch.from_numpy(found.indices).long()] < 0).sum()) < 600


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 9])
def test_small_k(k: int) -> None:
    vector = ramp(20)
    for threshold in np.arange(0.5, 22.0):
        found = reuse_threshold(vector, k, float(threshold))
        assert 0.8 * k <= len(found.indices) <= k
        assert found.indices.tolist() == indices_of_largest(vector, len(found.indices))


@given(
    values=st.lists(st.integers(-6, 6), min_size=1, max_size=60),
    threshold=st.one_of(st.none(), st.floats(0.01, 8.0)),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_always_the_largest_and_always_enough(
    values: list[int], threshold: float | None, dtype: torch.dtype, data: st.DataObject
) -> None:
    vector = torch.tensor(values).to(dtype)
    k = data.draw(st.integers(1, len(values)))
    found = reuse_threshold(vector, k, threshold)
    assert 0.8 * k <= len(found.indices) <= k
    assert found.indices.tolist() == indices_of_largest(vector, len(found.indices))


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
def test_no_threshold_where_none_could_be_corrected(value: float) -> None:
    vector = torch.full((100,), value)
    found = reuse_threshold(vector, 10, None)
    assert found.threshold is None
    assert found.indices.tolist() == list(range(10))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_and_magnitudes(dtype: torch.dtype) -> None:
    tiny, largest = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    for value in (tiny / 2, tiny, 1.0, 1.5, largest):
        key = key_from(value, dtype)
        assert value_of(key, dtype) == value
        assert key == int(bit_view(torch.tensor(-value, dtype=dtype))) & magnitude_mask(dtype)
        assert key_from(math.nextafter(value, 0.0), dtype) == key - (dtype is torch.float64)
        assert key_from(math.nextafter(value, math.inf), dtype) == key + 1
    assert value_of(key_from(1e308, dtype), dtype) in (1e308, math.inf)


def counting_passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows by a name for every pass over the vector."""
    passes: list[str] = []
    for name in ("counted_scan", "largest_magnitudes"):
        inner = getattr(largest, name)

        def counted(*arguments: object, name: str = name, inner: Callable[..., object] = inner) -> object:
            passes.append(name)
            return inner(*arguments)

        monkeypatch.setattr(estimated, name, counted)
    return passes


def test_one_pass_where_the_threshold_fits_or_is_too_low(monkeypatch: pytest.MonkeyPatch) -> None:
    vector = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    threshold = float(vector.abs().topk(2000).values[-1])
    passes = counting_passes(monkeypatch)
    for factor, expected in ((1.0, ["counted_scan"]), (0.5, ["counted_scan"])):
        reuse_threshold(vector, 2000, factor * threshold)
        assert passes == expected
        passes.clear()
    reuse_threshold(vector, 2000, 2 * threshold)
    assert passes[:2] == ["counted_scan", "largest_magnitudes"]


@pytest.mark.parametrize(
    ("drift", "most_exact"), [(0.0, 0.1), (0.5, 0.3)], ids=["stationary", "scale drifting by e^0.5 in 100 steps"]
)
@pytest.mark.parametrize("rows", [False, True], ids=["one scale", "a scale per row"])
def test_under_error_feedback(drift: float, most_exact: float, rows: bool) -> None:
    n, k, steps = 32_000, 640, 300
    generator = torch.Generator().manual_seed(0)
    scale = torch.randn(100, generator=generator).exp().repeat_interleave(n // 100) if rows else torch.ones(n)
    residual, threshold, afresh = torch.zeros(n), None, 0
    for step in range(steps):
        gradient = torch.randn(n, generator=generator) * scale
        residual += gradient * math.exp(drift * math.sin(2 * math.pi * step / 400))
        found = reuse_threshold(residual, k, threshold)
        assert 0.8 * k <= len(found.indices) <= k
        threshold = found.threshold
        afresh += found.exact
        residual[torch.from_numpy(found.indices).long()] = 0.0
    assert 1 <= afresh <= most_exact * steps, afresh


def test_all_are_sent_where_all_are_wanted() -> None:
    """Also those below a threshold of an earlier step: density 1 is the dense exchange."""
    vector = torch.arange(1, 101, dtype=torch.float32)
    found = estimated.reuse_threshold(vector, 100, threshold=50.0)
    assert found.exact and len(found.indices) == 100
