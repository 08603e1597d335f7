# SPDX-License-Identifier: Apache-2.0
"""Mean differences of paired trainings, with intervals. Two trainings are a pair if they share seed and data."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

SHARE = 0.95  # of the intervals that contain the true mean, if differences are normally distributed


@dataclass(frozen=True)
class Interval:
    """Mean of a sample, and the half width of its interval."""

    mean: float
    half: float | None  # None: one value says nothing about the spread
    count: int  # of the values

    @property
    def low(self) -> float | None:
        """Return the lower end; None: there is no interval."""
        return None if self.half is None else self.mean - self.half

    @property
    def high(self) -> float | None:
        """Return the upper end; None: there is no interval."""
        return None if self.half is None else self.mean + self.half


def excess_percent(values: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Return by how many percent each value exceeds its partner in ``baseline``, which is as long, or ValueError."""
    return [100.0 * (value / base - 1.0) for value, base in zip(values, baseline, strict=True)]


def mean_interval(values: Sequence[float], share: float = SHARE) -> Interval:
    """Return the mean and its interval by Student's t. Raises ValueError for no values.

    Args:
        values: independent values, such as differences by seed.
        share: of the intervals that contain the true mean, between 0 and 1.
    """
    if not values:
        raise ValueError("mean_interval(): expected at least one value, got none")
    mean, count = statistics.fmean(values), len(values)
    if count == 1:
        return Interval(mean, None, 1)
    return Interval(mean, student_t(count - 1, share) * statistics.stdev(values) / math.sqrt(count), count)


def student_t(freedom: int, share: float = SHARE) -> float:
    """Return t such that ``share`` of Student's distribution lies between -t and t.

    Args:
        freedom: degrees of freedom, at least 1.
        share: between 0 and 1.

    Raises:
        ValueError: For other values.
    """
    if freedom < 1 or not 0.0 < share < 1.0:
        raise ValueError(f"student_t(): expected freedom >= 1 and 0 < share < 1, got {freedom} and {share}")
    low, high = 0.0, 1.0
    while central_share(high, freedom) < share:
        high *= 2.0
    for _ in range(200):
        middle = (low + high) / 2.0
        low, high = (middle, high) if central_share(middle, freedom) < share else (low, middle)
    return (low + high) / 2.0


def central_share(t: float, freedom: int) -> float:
    """Return the share of Student's distribution between -t and t: a finite series, for whole degrees of freedom."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for number in range(freedom // 2):
        total += term
        step = 2 * number + 1 + odd
        term *= cosine * cosine * step / (step + 1)
    total *= math.sin(angle)
    return 2.0 / math.pi * (angle + total) if odd else total
