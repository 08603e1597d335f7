# SPDX-License-Identifier: Apache-2.0
"""Times of whole steps, from the end of one to the end of the next, as a user sees them."""

from __future__ import annotations

import statistics
import time

KEEP = 50  # steps: the median is of no more


class WholeSteps:
    """Durations of this rank's last steps. Time between ``end`` and ``begin`` does not count."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._began = time.perf_counter()

    def begin(self) -> None:
        """Begin the next step now."""
        self._began = time.perf_counter()

    def end(self) -> None:
        """Count a step that has ended."""
        self._seconds = [*self._seconds[1 - KEEP :], time.perf_counter() - self._began]

    def typical(self) -> float:
        """Return the median in seconds; 0 before the first step has ended."""
        return statistics.median(self._seconds) if self._seconds else 0.0
