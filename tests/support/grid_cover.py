"""Which cases of a grid of parameters are enough for a quick run."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence

Case = Sequence[Hashable]  # a value for each axis


def cover(cases: Sequence[Case]) -> list[int]:
    """The places of those ``cases`` that hold every pair of values of two axes that any of them holds.

    Where there are only two axes that would be all of them: then each value of an axis is held once at least.
    Deterministic: the case with most that is new, and of several the first, is taken until nothing is new.
    """
    axes = range(len(cases[0])) if cases else range(0)
    together = 2 if len(axes) > 2 else 1
    held = [{(at, tuple(case[i] for i in at)) for at in itertools.combinations(axes, together)} for case in cases]
    missing = set().union(*held)
    chosen = []
    while missing:
        # Two axes: where two cases have as much that is new, values of the other axis take turns.
        scores = [(len(one & missing), -_used(cases, chosen, place), -place) for place, one in enumerate(held)]
        best = -max(scores)[-1]
        chosen.append(best)
        missing -= held[best]
    return sorted(chosen)


def _used(cases: Sequence[Case], chosen: Sequence[int], place: int) -> int:
    """How often the values of a case have been taken."""
    return sum(value == cases[other][axis] for other in chosen for axis, value in enumerate(cases[place]))
