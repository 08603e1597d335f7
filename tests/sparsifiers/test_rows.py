# SPDX-License-Identifier: Apache-2.0
"""k is dealt to rows fairly and exactly, and each row's largest are found, on the CPU and as on a device."""

from __future__ import annotations

import math
import tracemalloc
from bisect import bisect, insort
from itertools import accumulate, pairwise
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparsifiers import native, rows_search
from sparsifiers.largest import bit_view, magnitude_mask
from sparsifiers.rows import CIRCLE, GOLDEN, Matrix, deal, matrices, sum_of_floors
from sparsifiers.rows_search import (
    largest_in_rows,
    largest_in_rows_on_device,
    maxima_and_largest,
    maxima_and_largest_on_device,
    rows_top,
)

Shapes = list[tuple[int, ...]]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]

some_shapes = st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=5)


pytestmark = pytest.mark.usefixtures("one_thread")


def size(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)


def indices_of(matrix: Matrix) -> np.ndarray:
    """Indices into the vector, [rows, length]."""
    flat = np.arange(matrix.offset, matrix.stop)
    return flat.reshape(matrix.length, matrix.rows).T if matrix.columns else flat.reshape(matrix.rows, matrix.length)


def best_first(magnitudes: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Ascending `places` by (-magnitude, index)."""
    return places[np.argsort(-magnitudes[places], kind="stable")]


def brute_rows(vector: Tensor, k: int, turn: int, shapes: Shapes) -> list[int]:
    found: list[int] = []
    magnitudes = vector.double().abs().numpy()
    for share in deal(matrices(shapes), k, turn):
        for places, quota in zip(indices_of(share.matrix), share.quotas(), strict=True):
            found += best_first(magnitudes, places)[:quota].tolist()
    return sorted(found)


def brute_fill(vector: Tensor, k: int, step: int, shapes: Shapes) -> list[int]:
    magnitudes = vector.double().abs().numpy()
    maxima = [row[np.argmax(magnitudes[row])] for m in matrices(shapes) if m.structured for row in indices_of(m)]
    total = len(maxima)
    if k < total:
        return sorted(int(place) for r, place in enumerate(maxima) if (r - step * k) % total < k)
    others = np.setdiff1d(np.arange(len(vector)), maxima)
    return sorted([*map(int, maxima), *best_first(magnitudes, others)[: k - total].tolist()])


def test_geometry() -> None:
    shapes = [(4, 2, 3, 3), (300, 7), (24,), (0, 5), (), (1, 9), (9, 1), (5, 5)]
    assert matrices(shapes) == [
        Matrix(0, 4, 18, False, True),
        Matrix(72, 7, 300, True, True),
        Matrix(2172, 1, 24, False, False),
        Matrix(2196, 1, 1, False, False),
        Matrix(2197, 1, 9, False, True),
        Matrix(2206, 1, 9, False, True),
        Matrix(2215, 5, 5, False, True),
    ]
    assert matrices(shapes)[-1].stop == size(shapes)
    assert matrices([(0,), (3, 0)]) == []


@given(shapes=some_shapes, turn=st.integers(0, 10**6), data=st.data())
def test_a_deal_is_exact_and_fair(shapes: Shapes, turn: int, data: st.DataObject) -> None:
    n = size(shapes)
    k = data.draw(st.integers(1, n))
    shares = deal(matrices(shapes), k, turn)
    assert sum(share.count for share in shares) == k
    for share in shares:
        numel = share.matrix.rows * share.matrix.length
        assert k * numel // n <= share.count <= min(numel, -(-k * numel // n))
        quotas = share.quotas()
        assert quotas.sum() == share.count
        assert quotas.max() - quotas.min() <= 1
        assert quotas.max() <= share.matrix.length


@given(rows=st.integers(1, 40), length=st.integers(1, 40), step=st.integers(0, 10**6), data=st.data())
def test_one_tensor_is_dealt_by_its_formula(rows: int, length: int, step: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, rows * length))
    (share,) = deal([Matrix(0, rows, length, False, True)], k, step)
    expected = [k // rows + ((r - step * (k % rows)) % rows < k % rows) for r in range(rows)]
    assert share.quotas().tolist() == expected


@pytest.mark.parametrize("k", [1, 3, 40, 333])
def test_rows_of_a_tensor_never_differ_by_more_than_one(k: int) -> None:
    shapes = [(16, 20), (32,), (300, 7), (40, 3, 3, 3), (12,), (64, 64)]
    shares = [deal(matrices(shapes), k, turn) for turn in range(800)]
    for tensor in range(len(shapes)):
        sent = np.cumsum([step[tensor].quotas() for step in shares], axis=0)
        assert (sent.max(axis=1) - sent.min(axis=1)).max() <= 1


def test_tensors_of_less_than_one_are_served_in_turn() -> None:
    sizes = [(1,), (32,), (100, 20), (5,), (300,), (7, 11), (2,)]
    n, turns = size(sizes), 6000
    for k in (1, 7, 60):
        tensors = matrices(sizes)
        served: list[list[int]] = [[] for _ in tensors]
        for turn in range(turns):
            for at, share in zip(served, deal(tensors, k, turn), strict=True):
                if share.count:
                    at.append(turn)
        for tensor, at in zip(tensors, served, strict=True):
            longest = math.ceil(2 * n / (k * tensor.rows * tensor.length))
            waits = [b - a for a, b in pairwise([-1, *at, turns])]
            assert max(waits) <= longest, (k, tensor)


def test_the_golden_circle_has_no_gap_above_two_by_the_number_of_points() -> None:
    points: list[int] = [0]
    gaps = {0: CIRCLE}  # the arc that begins at a point
    largest = [CIRCLE]
    for count in range(1, 3000):
        place = count * GOLDEN % CIRCLE
        before = points[bisect(points, place) - 1]
        gaps[place] = before + gaps[before] - place
        gaps[before] = place - before
        insort(points, place)
        largest.append(max(gaps.values()))
    assert max(gap * (count + 1) for count, gap in enumerate(largest)) < 1.9 * CIRCLE


@given(count=st.integers(0, 300), start=st.integers(0, 2**110))
def test_sum_of_floors(count: int, start: int) -> None:
    assert sum_of_floors(count, start) == sum((GOLDEN * i + start) // CIRCLE for i in range(count))


def vectors(n: int, dtype: torch.dtype, data: st.DataObject) -> Tensor:
    values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 3.0, -3.0, math.inf, -math.inf, math.nan])
    if data.draw(st.booleans()):
        return torch.tensor(data.draw(st.lists(values, min_size=n, max_size=n))).nan_to_num(nan=math.inf).to(dtype)
    return torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)


@given(shapes=some_shapes, dtype=st.sampled_from(DTYPES), step=st.integers(0, 50), data=st.data())
def test_both_paths_equal_brute_force(shapes: Shapes, dtype: torch.dtype, step: int, data: st.DataObject) -> None:
    n = size(shapes)
    k = data.draw(st.integers(1, n))
    vector = vectors(n, dtype, data)
    bits, mask = bit_view(vector).numpy(), magnitude_mask(dtype)
    forced = [matrix for matrix in matrices(shapes) if matrix.structured]
    expected, filled = brute_rows(vector, k, step, shapes), brute_fill(vector, k, step, shapes)
    assert largest_in_rows(bits, mask, k, step, shapes).tolist() == expected
    assert maxima_and_largest(bits, mask, k, step, forced).tolist() == filled
    for block in (rows_search.BLOCK, data.draw(st.integers(1, 20))):
        with patch.multiple(rows_search, BLOCK=block, PART=2), patch.object(native, "library", None):
            assert largest_in_rows(bits, mask, k, step, shapes).tolist() == expected
            assert maxima_and_largest(bits, mask, k, step, forced).tolist() == filled
    assert largest_in_rows_on_device(vector, k, step, shapes).tolist() == expected
    if forced:
        assert maxima_and_largest_on_device(vector, k, step, forced).tolist() == filled


@pytest.fixture(params=["numpy", "compiled"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which loops search: numpy's, or the compiled ones as far as they were built."""
    if request.param == "numpy":
        monkeypatch.setattr(native, "library", None)
    elif not native.available():
        pytest.skip("the compiled loops were not built")
    return str(request.param)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("normal", torch.float32), ("three values", torch.float32), ("zeros", torch.float32)]
    + [("normal", torch.float64), ("normal", torch.bfloat16)],
    ids=str,
)
def test_large_tensors(kind: str, dtype: torch.dtype, loops: str) -> None:
    if loops == "compiled" and dtype is not torch.float32:
        pytest.skip("the compiled loops read float32")
    shapes: Shapes = [(64, 300), (5000, 40), (2, 70_000), (66_000, 2), (11, 13, 3, 3), (96,)]
    n = size(shapes)
    vector = torch.randn(n, generator=torch.Generator().manual_seed(0)).to(dtype)
    vector = {"normal": vector, "three values": vector.sign() * (vector.abs() > 1), "zeros": vector * 0}[kind]
    bits, mask = bit_view(vector).numpy(), magnitude_mask(dtype)
    forced = [matrix for matrix in matrices(shapes) if matrix.structured]
    for k in (50, n // 20):
        rows = largest_in_rows(bits, mask, k, 3, shapes)
        assert rows.dtype == np.int32
        assert rows.tolist() == brute_rows(vector, k, 3, shapes)
        assert largest_in_rows_on_device(vector, k, 3, shapes).tolist() == rows.tolist()
        filled = maxima_and_largest(bits, mask, k, 3, forced)
        assert filled.dtype == np.int32
        assert maxima_and_largest_on_device(vector, k, 3, forced).tolist() == filled.tolist()
    assert filled.tolist() == brute_fill(vector, k, 3, shapes)


def test_any_quotas_and_strides() -> None:
    rng = np.random.default_rng(1)
    wide = rng.integers(-50, 50, (30, 90)).astype(np.int32)
    for table in (wide, wide[:, ::2], wide[::3], wide.T, np.broadcast_to(wide[0], (5, 90))):
        rows, length = table.shape
        for quotas in (rng.integers(0, length + 1, rows), np.zeros(rows, np.int64), np.full(rows, length)):
            keys = table & 0x7FFFFFFF
            expected = [
                r * length + place
                for r, quota in enumerate(quotas)
                for place in sorted(sorted(range(length), key=lambda place, r=r: (-keys[r, place], place))[:quota])
            ]
            assert rows_top(table, 0x7FFFFFFF, quotas).tolist() == expected


def test_a_strided_vector(loops: str) -> None:
    wide = torch.randn(2000, 3, generator=torch.Generator().manual_seed(0))[:, 1]
    shapes: Shapes = [(30, 40), (40, 20)]
    bits, mask = bit_view(wide).numpy(), magnitude_mask(wide.dtype)
    expected = brute_rows(wide.contiguous(), 77, 5, shapes)
    assert largest_in_rows(bits, mask, 77, 5, shapes).tolist() == expected
    assert largest_in_rows_on_device(wide, 77, 5, shapes).tolist() == expected


def test_the_device_path_reads_no_value_on_the_host() -> None:
    vector = torch.empty(1524, device="meta")
    shapes: Shapes = [(25, 40), (20, 5, 5), (24,)]
    for k in (3, 500):
        assert largest_in_rows_on_device(vector, k, 2, shapes).shape == (k,)
        assert maxima_and_largest_on_device(vector, k, 2, matrices(shapes)[:2]).shape == (k,)


@pytest.mark.parametrize("kind", ["normal", "zeros"])
@pytest.mark.parametrize("shape", [(4000, 1000), (1000, 4000), (200_000, 20), (20, 200_000), (4_000_000, 1)])
def test_scratch_is_small(shape: tuple[int, int], kind: str, loops: str) -> None:
    vector = torch.randn(math.prod(shape), generator=torch.Generator().manual_seed(0)) * (kind == "normal")
    bits, mask = bit_view(vector).numpy(), magnitude_mask(vector.dtype)
    for run in (
        lambda: largest_in_rows(bits, mask, 20_000, 1, [shape]),
        lambda: maxima_and_largest(bits, mask, 20_000, 1, matrices([shape])),
    ):
        tracemalloc.start()
        try:
            run()
            assert tracemalloc.get_traced_memory()[1] < vector.nbytes // 4
        finally:
            tracemalloc.stop()


def test_offsets_run_on() -> None:
    shapes: Shapes = [(3, 4), (5,), (2, 2)]
    assert [m.offset for m in matrices(shapes)] == [0, *accumulate(map(math.prod, shapes))][:-1]
