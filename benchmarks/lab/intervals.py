# SPDX-License-Identifier: Apache-2.0
"""Medians of ratios, or means of differences, and how sure they are."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence

DRAWS = 2000


def interval(
    values: Sequence[float], middle: Callable[[Sequence[float]], float] = statistics.median
) -> tuple[float, float, float]:
    """Return the middle of the values, and its 95 % bootstrap interval: the same for the same values."""
    source = random.Random(0)
    middles = sorted(middle(source.choices(values, k=len(values))) for _ in range(DRAWS))
    return middle(values), middles[DRAWS // 40], middles[-DRAWS // 40 - 1]
