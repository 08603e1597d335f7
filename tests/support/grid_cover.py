# SPDX-License-Identifier: Apache-2.0
"""Which cases of a grid of parameters are enough for a quick run."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Sequence

Case = Sequence[Hashable]  # a value for each axis


def cover(cases: Sequence[Case], most: int = 2) -> list[int]:
    """The places of those ``cases`` that hold every pair of values of two axes that any of them holds.

    Where there are only two axes that would be all of them: then each value of an axis is held once at least, and with
    ``most=1`` in any case.
    Deterministic: the case with most that is new, and of several the first, is taken until nothing is new.
    """
    axes = range(len(cases[0])) if cases else range(0)
    together = min(most, 2 if len(axes) > 2 else 1)
    held = [{(at, tuple(case[i] for i in at)) for at in itertools.combinations(axes, together)} for case in cases]
    missing = set().union(*held)
    chosen: list[int] = []
    used: Counter[tuple[int, Hashable]] = Counter()  # how often each value of an axis has been taken
    while missing:
        # Where two cases have as much that is new, values of other axes take turns.
        scores = [
            (len(one & missing), -sum(used[value] for value in enumerate(case)), -place)
            for place, (one, case) in enumerate(zip(held, cases, strict=True))
        ]
        best = -max(scores)[-1]
        chosen.append(best)
        used.update(enumerate(cases[best]))
        missing -= held[best]
    return sorted(chosen)
