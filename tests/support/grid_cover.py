# SPDX-License-Identifier: Apache-2.0
"""Which cases of a grid of parameters are enough for a quick run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import pytest

RUN: pytest.StashKey[dict[str, bool]] = pytest.StashKey()  # whether `make test` runs each test that was collected
Case = Sequence[Hashable]  # a value for each axis


def cover(cases: Sequence[Case]) -> list[int]:
    """Return the places of ``cases`` that together hold each value of each axis.

    Deterministic: the case with most values that are new, and of several the first, is taken until nothing is new.
    """
    held = [set(enumerate(case)) for case in cases]
    missing = set().union(*held)
    chosen: list[int] = []
    used: Counter[tuple[int, Hashable]] = Counter()  # how often each value of an axis has been taken
    while missing:
        # Where two cases have as much that is new, values of other axes take turns.
        scores = [
            (len(values & missing), -sum(used[value] for value in values), -place) for place, values in enumerate(held)
        ]
        best = -max(scores)[-1]
        chosen.append(best)
        used.update(held[best])
        missing -= held[best]
    return sorted(chosen)
