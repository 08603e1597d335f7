# SPDX-License-Identifier: Apache-2.0
"""The bisection for the k-th key: k indices whatever the start, no value read by the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sparsifiers
from sparsifiers.base import Request
from sparsifiers.largest import bracket, keys_of, magnitude_mask, take

pytestmark = pytest.mark.usefixtures("one_thread")

Draw = Callable[..., Tensor]
Ranked = Callable[[Tensor], np.ndarray]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("threshold", "dgc", "gaussiank", "redsync", "redsync-trim")),
    *((name, {}) for name in ("sidco-e", "sidco-gp", "sidco-gamma")),
    ("threshold", {"tau": 1.0}),
    ("dgc", {"mode": "paper"}),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("start", [None, "right", "zero", "largest"])
def test_k_of_the_largest(dtype: torch.dtype, start: str | None, distribution: str, draw: Draw, ranked: Ranked) -> None:
    vector = draw(distribution, 30_000, dtype)
    vector[5], vector[6] = float("nan"), float("-inf")
    order, keys = ranked(vector), keys_of(vector)
    magnitudes = vector.double().abs().nan_to_num(nan=float("inf")).numpy()
    for k in (1, 300, 15_000, 30_000):
        kth = int(np.sort(keys.numpy())[len(keys) - k])
        place = {"right": kth, "zero": 0, "largest": magnitude_mask(dtype)}
        first = None if start is None else torch.tensor(place[start])
        indices, count = take(keys, *bracket(keys, k, dtype, start=first), k)
        assert indices.dtype == count.dtype == torch.int32
        assert int(count) == k
        assert (indices[1:] > indices[:-1]).all()
        if dtype.itemsize == 2:  # 18 halvings are more than its keys need
            assert np.array_equal(indices.numpy(), np.sort(order[:k])), k
        slack = {torch.float32: 2e-3, torch.float64: 1e-2}.get(dtype, 0.0) * (1e-3 if start == "right" else 1.0)
        assert magnitudes[indices.numpy()].min() >= (1 - slack) * magnitudes[order[k - 1]], k


@settings(deadline=None)
@given(
    keys=st.lists(st.integers(0, 40), min_size=1, max_size=60),
    k=st.integers(1, 60),
    floor=st.integers(-1, 41),
    start=st.none() | st.integers(0, 32767),
)
def test_a_floor_leaves_out_what_does_not_exceed_it(keys: list[int], k: int, floor: int, start: int | None) -> None:
    k = min(k, len(keys))
    held = torch.tensor(keys, dtype=torch.int16)
    first = None if start is None else torch.tensor(start)
    low, high = bracket(held, k, torch.float16, start=first, floor=torch.tensor(floor))
    indices, count = take(held, low, high, k)
    above = [place for place, key in enumerate(keys) if key > floor]
    expected = sorted(sorted(above, key=lambda place: (-keys[place], place))[:k])
    assert indices[: int(count)].tolist() == expected
    assert len(indices) == k
    assert ((indices >= 0) & (indices < len(keys))).all()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_value_is_read_on_the_host(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    # A meta tensor has no values, so whatever would wait for one raises.
    sparsifier = sparsifiers.get(name, 0.1, **options)
    for n in (1000, 300_000):
        for step in range(2):
            selection = sparsifier.select(torch.empty(n, device="meta", dtype=dtype), key=str(n), step=step)
            assert selection.indices.device.type == "meta"
            assert selection.indices.shape == (n // 10,)
            assert selection.indices.dtype == torch.int32


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_the_device_path_selects_what_the_host_would(
    name: str, options: dict[str, Any], distribution: str, draw: Draw, ranked: Ranked
) -> None:
    vector = draw(distribution, 100_000)
    order, magnitudes = ranked(vector), vector.abs().double().numpy()
    sparsifier = sparsifiers.get(name, **options)
    for step in range(2):
        for k in (10, 1000, 60_000):
            selection = sparsifier._select_on_device(vector, Request(k, "", step, ((100_000,),)))
            chosen = selection.trimmed().numpy()
            if not options:
                assert selection.count == k
            assert magnitudes[chosen].sum() >= 0.999 * magnitudes[order[: len(chosen)]].sum()


def test_starting_right_takes_fewer_steps(draw: Draw) -> None:
    vector = draw("gaussian", 100_000)
    keys = keys_of(vector)
    kth = int(np.sort(keys.numpy())[-1000])
    widths = {}
    for name, start in (("cold", None), ("near", torch.tensor(int(kth * 1.0001))), ("wrong", torch.tensor(5))):
        low, high = bracket(keys, 1000, torch.float32, start=start)
        assert int(low) < kth <= int(high)
        widths[name] = int(high) - int(low)
    assert widths["near"] <= 16
    assert widths["cold"] == 2**13
    assert widths["wrong"] <= 2**13
