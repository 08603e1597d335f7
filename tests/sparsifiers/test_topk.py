# SPDX-License-Identifier: Apache-2.0
"""topk is exact: the same indices as a brute-force sort, for every dtype, distribution, length and k."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import sparsifiers
from sparsifiers import largest, native
from sparsifiers.largest import bit_view, largest_magnitudes_on_device, magnitude_mask

pytestmark = pytest.mark.usefixtures("loops")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SPECIALS = [0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 1e-7, float("inf"), float("-inf"), float("nan")]

Ranked = Callable[[Tensor], np.ndarray]
Draw = Callable[..., Tensor]


def select(vector: Tensor, k: int) -> list[int]:
    return sparsifiers.get("topk").select(vector, k=k).trimmed().tolist()


def on_device(vector: Tensor, k: int) -> list[int]:
    return largest_magnitudes_on_device(vector, k).tolist()


def ks(n: int) -> list[int]:
    return sorted({1, max(1, n // 1000), max(1, n // 100), max(1, n // 2), max(1, n - 1), n})


def lists_of(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.integers(1, 120).flatmap(lambda size: st.lists(values, min_size=size, max_size=size))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_brute_force(distribution: str, dtype: torch.dtype, draw: Draw, ranked: Ranked) -> None:
    for n in (1, 2, 31, 1000, 65537):
        vector = draw(distribution, n, dtype)
        order = ranked(vector)
        for k in ks(n):
            expected = np.sort(order[:k])
            assert np.array_equal(select(vector, k), expected), (n, k)
            if n <= 1000:
                assert np.array_equal(on_device(vector, k), expected), (n, k)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_device_path_equals_brute_force_on_a_long_vector(
    distribution: str, dtype: torch.dtype, draw: Draw, ranked: Ranked
) -> None:
    vector = draw(distribution, 65537, dtype)
    assert np.array_equal(on_device(vector, 656), np.sort(ranked(vector)[:656]))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_equals_brute_force_on_a_million(distribution: str, dtype: torch.dtype, draw: Draw, ranked: Ranked) -> None:
    vector = draw(distribution, 1_000_000, dtype)
    order = ranked(vector)
    for k in (1, 1000, 10_000, 300_000):
        chosen = sparsifiers.get("topk").select(vector, k=k).indices.numpy()
        assert np.array_equal(chosen, np.sort(order[:k])), k


@pytest.mark.parametrize("choose", [select, on_device])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_then_inf_then_numbers(choose: Callable[[Tensor, int], list[int]], dtype: torch.dtype) -> None:
    vector = torch.tensor([1.0, float("-inf"), 0.0, float("nan"), float("inf"), -2.0, -0.0], dtype=dtype)
    found = [choose(vector, k) for k in range(1, 8)]
    best_first = [3, 1, 4, 5, 0, 2, 6]
    assert found == [sorted(best_first[:k]) for k in range(1, 8)]


def test_nan_sorts_by_payload_whatever_its_sign() -> None:
    patterns = torch.tensor([0x7F800000, 0x7FC00000, -0x00200000, 0x7FC00001], dtype=torch.int32)  # 2: -nan
    vector = patterns.view(torch.float32)
    assert vector.isnan().tolist() == [False, True, True, True]
    for choose in (select, on_device):
        assert [choose(vector, k) for k in (1, 2, 3)] == [[2], [2, 3], [1, 2, 3]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values_in_a_long_vector(dtype: torch.dtype, ranked: Ranked) -> None:
    n = 200_000
    generator = torch.Generator().manual_seed(7)
    vector = torch.randn(n, generator=generator).to(dtype)
    vector[torch.randint(n, (300,), generator=generator)] = float("nan")
    vector[torch.randint(n, (300,), generator=generator)] = float("-inf")
    order = ranked(vector)
    for k in (1, 299, 450, 2000):
        assert np.array_equal(select(vector, k), np.sort(order[:k]))


def test_subnormals_are_told_apart_even_when_arithmetic_flushes_them() -> None:
    vector = torch.tensor([1.4e-45, -4.2e-45, 0.0, 2.8e-45], dtype=torch.float32)
    assert torch.set_flush_denormal(True)
    try:
        assert select(vector, 1) == on_device(vector, 1) == [1]
        assert select(vector, 2) == on_device(vector, 2) == [1, 3]
    finally:
        torch.set_flush_denormal(False)


# Hypothesis draws short lists unless told otherwise, and in a short list nothing is ever cut back.
@given(values=lists_of(st.sampled_from(SPECIALS)), data=st.data())
def test_equals_brute_force_on_ties_in_small_blocks(values: list[float], data: st.DataObject, ranked: Ranked) -> None:
    vector = torch.tensor(values)
    k = data.draw(st.integers(1, len(values)))
    expected = np.sort(ranked(vector)[:k]).tolist()
    assert select(vector, k) == expected
    assert on_device(vector, k) == expected
    with patch.object(largest, "BLOCK", data.draw(st.integers(8, 24))):
        assert select(vector, k) == expected


@given(
    keys=lists_of(st.integers(0, 12)),
    k=st.integers(1, 15),
    floor=st.integers(-1, 13),
    block=st.integers(1, 30),
)
def test_scan_finds_the_largest_above_any_floor(keys: list[int], k: int, floor: int, block: int) -> None:
    signed = [-(2**15) + key if place % 3 == 0 else key for place, key in enumerate(keys)]
    above = [place for place, key in enumerate(keys) if key > floor]
    expected = sorted(sorted(above, key=lambda place: (-keys[place], place))[:k])
    with patch.object(largest, "BLOCK", block):
        assert largest.scan(np.array(signed, dtype=np.int16), 0x7FFF, k, floor).tolist() == expected


@pytest.mark.parametrize("floor", ["too high", "k - 1 above", "none"])
def test_no_guess_of_the_sample_changes_the_result(
    floor: str, monkeypatch: pytest.MonkeyPatch, distribution: str, draw: Draw, ranked: Ranked
) -> None:
    n, k = 150_000, 1500
    vector = draw(distribution, n)
    keys = bit_view(vector).numpy() & magnitude_mask(vector.dtype)
    guess = {"too high": int(keys.max()), "k - 1 above": int(np.sort(keys)[n - k]), "none": -1}[floor]
    asked = []
    for one in (largest, native):
        monkeypatch.setattr(one, "sampled_floor", lambda *_: asked.append(guess) or guess)
    assert np.array_equal(select(vector, k), np.sort(ranked(vector)[:k]))
    assert asked == [guess]


@pytest.mark.parametrize(("name", "most"), [("zero", 2), ("constant", 2), ("ternary", 2), ("ascending", 1)])
def test_held_keys_are_seldom_cut_back(name: str, most: int, monkeypatch: pytest.MonkeyPatch, draw: Draw) -> None:
    cuts = []
    inner = largest.largest
    monkeypatch.setattr(largest, "largest", lambda keys, k: cuts.append(len(keys)) or inner(keys, k))
    cut = native.cut
    monkeypatch.setattr(native, "cut", lambda *arguments: cuts.append(arguments[2]) or cut(*arguments))
    select(draw(name, 1_000_000), 10_000)
    assert 0 < len(cuts) <= most, cuts


@pytest.mark.parametrize("choose", [select, on_device])
@pytest.mark.parametrize("n", [301, 70_001])
def test_any_stride(choose: Callable[[Tensor, int], list[int]], n: int, draw: Draw, ranked: Ranked) -> None:
    wide = draw("gaussian", 3 * n).view(n, 3)
    for vector in (wide[:, 1], wide[1:, 0], torch.tensor([1.5]).expand(n), wide.view(-1)[1 : n + 1]):
        k = n // 50
        assert np.array_equal(choose(vector, k), np.sort(ranked(vector)[:k]))


def test_a_lazily_negated_vector() -> None:
    vector = torch.tensor([1 + 1j, 1 - 3j, 1 + 2j]).conj().imag
    assert vector.is_neg()
    assert select(vector, 2) == [1, 2]


def test_the_device_path_reads_no_value_on_the_host() -> None:
    # A meta tensor has no values, so whatever would wait for one raises.
    selection = sparsifiers.get("topk", 0.1).select(torch.empty(1000, device="meta"))
    assert selection.indices.device.type == "meta"
    assert selection.indices.shape == (100,)
    assert selection.indices.dtype == torch.int32
    assert selection.count == 100


def test_the_cpu_takes_the_path_without_large_temporaries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsifiers.largest.select_largest_on_device", None)
    assert select(torch.tensor([1.0, -2.0]), 1) == [1]


@pytest.mark.parametrize("count", [0, 5, 50, 60, 75, 76, 3000])
def test_a_scan_counts_what_exceeds_the_floor(count: int, loops: str) -> None:
    n, k, most = 300_000, 60, 75
    bits = np.zeros(n, dtype=np.int32)
    places = np.random.default_rng(0).permutation(n)[:count]
    bits[places] = np.arange(10, 10 + count)
    found, seen = largest.counted_scan(bits, 0x7FFFFFFF, k, 9, most)
    assert seen == min(count, most + 1)
    assert found.tolist() == sorted(places[-k:].tolist())
