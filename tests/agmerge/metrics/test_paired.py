# SPDX-License-Identifier: Apache-2.0
"""Means of paired differences, and their intervals by Student's t, against scipy and by drawing samples."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from agmerge.metrics.paired import Interval, central_share, excess_percent, mean_interval, student_t


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 10, 101])
def test_student_t_is_that_of_scipy(freedom: int) -> None:
    for share in (0.5, 0.95, 0.99):
        expected = stats.t.ppf((1 + share) / 2, freedom)
        assert student_t(freedom, share) == pytest.approx(expected, rel=1e-9)
        assert central_share(expected, freedom) == pytest.approx(share, rel=1e-9)


def test_an_interval_has_the_true_mean_as_often_as_it_says() -> None:
    samples = np.random.default_rng(0).normal(1.0, 2.0, (4000, 3))
    found = [mean_interval(sample.tolist()) for sample in samples]
    share = sum(abs(one.mean - 1.0) <= one.half for one in found if one.half is not None) / len(found)
    assert 0.94 < share < 0.96


def test_one_value_has_no_interval_and_none_is_an_error() -> None:
    assert mean_interval([3.0]) == Interval(3.0, None, 1)
    assert (mean_interval([3.0]).low, mean_interval([3.0]).high) == (None, None)
    with pytest.raises(ValueError, match="expected at least one value"):
        mean_interval([])
    with pytest.raises(ValueError, match="freedom >= 1"):
        student_t(0)


def test_differences_are_of_pairs_in_percent() -> None:
    excess = excess_percent([2.02, 3.0], [2.0, 4.0])
    assert excess == pytest.approx([1.0, -25.0])
    both = mean_interval(excess)
    assert both.low == pytest.approx(both.mean - both.half) and both.high == pytest.approx(both.mean + both.half)
    with pytest.raises(ValueError):
        excess_percent([1.0], [1.0, 2.0])
