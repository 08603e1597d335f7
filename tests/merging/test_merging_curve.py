# SPDX-License-Identifier: Apache-2.0
"""Curves: medians that never fall, straight lines between them, the same for a number and an array."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merging import Costs, Curve
from merging.measured import isotonic

QUICK = settings(deadline=None)
RUNS = st.lists(st.floats(0, 1e3), min_size=1, max_size=4)
SAMPLES = st.dictionaries(st.integers(1, 10**10), RUNS, min_size=1, max_size=7)
CURVES = st.builds(lambda samples, zero: Curve.fit(samples, zero=zero), SAMPLES, st.booleans())


@QUICK
@given(CURVES, st.lists(st.integers(0, 10**11), min_size=1, max_size=20))
def test_never_decreases_and_arrays_equal_numbers(curve: Curve, sizes: list[int]) -> None:
    around = [max(size + step, 0) for size in curve.elements for step in (-1, 0, 1)]
    at = np.array(sorted([*sizes, *around]), dtype=np.int64)
    seconds = curve(at)
    assert seconds.dtype == np.float64 and (np.diff(seconds) >= 0).all() and (seconds >= 0).all()
    assert seconds.tolist() == [curve(int(size)) for size in at] == curve(at.reshape(1, -1, 1)).ravel().tolist()
    assert all(curve(size) == value for size, value in zip(curve.elements, curve.seconds, strict=True))
    assert type(curve(3)) is float and type(curve(np.int64(3))) is float


@QUICK
@given(SAMPLES, st.booleans())
def test_fit_passes_through_isotonic_medians(samples: dict[int, list[float]], zero: bool) -> None:
    curve = Curve.fit(samples, zero=zero)
    sizes = sorted(samples)
    medians, weights = [float(np.median(samples[size])) for size in sizes], [len(samples[size]) for size in sizes]
    fitted = [curve(size) for size in sizes]
    if medians == sorted(medians):
        assert fitted == medians
    # The minimax formula: the largest over starts of the smallest weighted mean over stops.
    for i, value in enumerate(fitted):
        means = [
            min(np.average(medians[a:b], weights=weights[a:b]) for b in range(i + 1, len(sizes) + 1))
            for a in range(i + 1)
        ]
        assert value == pytest.approx(max(means), rel=1e-9, abs=1e-9)
    assert curve(0) == (0.0 if zero else fitted[0])
    assert curve(1) == fitted[0]


def test_by_hand() -> None:
    curve = Curve((10, 20, 100), (1.0, 2.0, 4.0))
    assert [curve(x) for x in (0, 10, 15, 20, 60, 100)] == [1.0, 1.0, 1.5, 2.0, 3.0, 4.0]
    assert curve(180) == 6.0  # the secant from 20, the last point of at most 25
    # One noisy point close to the end does not set the slope beyond it.
    assert Curve((0, 90, 100), (0.0, 0.5, 1.0))(200) == 2.0
    assert Curve((0, 100), (0.0, 1.0))(300) == 3.0
    assert Curve((7,), (2.0,))(np.array([0, 7, 10**9])).tolist() == [2.0] * 3
    assert isotonic([1.0, 3.0, 2.0, 2.0], [1, 1, 1, 2]) == [1.0, 2.25, 2.25, 2.25]
    assert Curve.fit({100: [3.0, 1.0, 2.0], 10: [5.0]}) == Curve((10, 100), (2.75, 2.75))
    assert Curve.fit({8: [3.0]}, zero=True) == Curve((0, 1, 8), (0.0, 3.0, 3.0))
    assert Curve.fit({1: [3.0], 8: [4.0]}, zero=True) == Curve((0, 1, 8), (0.0, 3.0, 4.0))
    assert curve.scaled(2) == Curve((10, 20, 100), (2.0, 4.0, 8.0)) and curve.scaled(0)(50) == 0.0


def test_rounding_does_not_overshoot_the_next_point() -> None:
    curve = Curve((3, 30), (0.3, 0.9))
    assert 0.3 + (0.9 - 0.3) / 27 * (np.nextafter(30.0, 0) - 3) > 0.9
    assert curve(np.nextafter(30.0, 0)) <= 0.9 == curve(30)


def test_serves_as_a_cost() -> None:
    select = Curve.fit({1000: [1e-5], 10**6: [1e-3]}, zero=True)
    costs = Costs(select, select.scaled(2), select)
    assert costs.sparsify(0) == 0 and costs.sparsify(1) == 1e-5
    assert costs.exchange(np.array([[0, 10**6]])).tolist() == [[0.0, 2e-3]]
    assert costs == Costs(Curve(select.elements, select.seconds), select.scaled(2), select)
    with pytest.raises(ValueError, match=r"sparsify\(0\) is 1e-05"):
        Costs(Curve.fit({1000: [1e-5]}), select)


@QUICK
@given(CURVES)
def test_the_same_value_however_it_travels(curve: Curve) -> None:
    before = curve(np.array([1, 10**10]))
    for copied in (Curve.loads(curve.dumps()), pickle.loads(pickle.dumps(curve)), copy.deepcopy(curve)):
        assert copied == curve and hash(copied) == hash(curve) and copied.dumps() == curve.dumps()
        assert copied(np.array([1, 10**10])).tobytes() == before.tobytes()
    assert eval(repr(curve)) == curve


def test_files_and_spelling(tmp_path: Path) -> None:
    curve = Curve((np.int64(1), 5), (np.float64(-0.0), 0.1))
    assert curve.dumps() == Curve((1, 5), (0.0, 0.1)).dumps() and repr(curve) == repr(Curve((1, 5), (0, 0.1)))
    curve.save(tmp_path / "curve.json")
    assert Curve.load(tmp_path / "curve.json") == curve != curve.scaled(2)
    (tmp_path / "curve.json").write_text(curve.dumps().replace("0.1", "0.2"))
    with pytest.raises(ValueError, match=r"curve\.json: .*damaged"):
        Curve.load(tmp_path / "curve.json")


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: Curve((), ()), ValueError, "at least one"),
        (lambda: Curve((1, 2), (1.0,)), ValueError, "2 elements and 1 seconds"),
        (lambda: Curve((2, 2), (1.0, 1.0)), ValueError, r"elements\[1\] is 2 after 2"),
        (lambda: Curve((1, 2), (2.0, 1.0)), ValueError, r"seconds\[1\] is 1.0 after 2.0.*Curve\.fit"),
        (lambda: Curve((-1,), (1.0,)), ValueError, r"elements\[0\] is -1"),
        (lambda: Curve((1.5,), (1.0,)), TypeError, r"elements\[0\] is 1.5"),  # type: ignore[arg-type]
        (lambda: Curve((1,), (float("nan"),)), ValueError, r"seconds\[0\] is nan.*finite"),
        (lambda: Curve((1,), (-1.0,)), ValueError, r"seconds\[0\] is -1.0.*not negative"),
        (lambda: Curve((1,), ("1",)), TypeError, r"seconds\[0\] is '1'"),  # type: ignore[arg-type]
        (lambda: Curve.fit({}), ValueError, "curve: there are no samples"),
        (lambda: Curve.fit({3: []}), ValueError, "size 3 has no samples"),
        (lambda: Curve.fit({3: [1.0, float("inf")]}), ValueError, "a sample of 3 elements is inf"),
        (lambda: Curve.fit({3: [1.0, -1e-9]}), ValueError, "a sample of 3 elements is -1e-09"),
        (lambda: Curve.fit({0: [1.0]}, zero=True), ValueError, "a sampled size is 0.*at least 1"),
        (lambda: Curve((1,), (1.0,)).scaled(-1), ValueError, "factor is -1.0"),
        (lambda: Curve((1,), (1.0,)).scaled(float("nan")), ValueError, "factor is nan"),
    ],
)
def test_refuses(make: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make()
