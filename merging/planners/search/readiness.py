# SPDX-License-Identifier: Apache-2.0
"""Times at which tensors are usable, and seconds of selection from a run of them, for the published rules."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from merging.checks import Reals
from merging.costs import Costs
from merging.profile import Profile

Taken = Callable[[int, int], float]
"""Seconds for the tensors start <= i < stop as one merge buffer."""


def usable(profile: Profile, costs: Costs, mode: str) -> Reals:
    """Return when each tensor can be merged, in seconds since backward began, shape (n,).

    Selection counts where it precedes merging (ahead); behind, it belongs to the merge buffer.
    """
    steps = profile.backward + costs.sparsify(profile.work) if mode == "ahead" else profile.backward
    return np.cumsum(steps)


def selection(profile: Profile, costs: Costs, mode: str) -> Taken:
    """Return the seconds of selection: one for the run (behind), one per tensor (ahead), none otherwise."""
    work = _sums(profile.work.tolist())
    if mode == "behind":
        return lambda start, stop: costs.sparsify(work[stop] - work[start])
    if mode == "ahead":
        each = costs.sparsify(profile.work).tolist()
        return lambda start, stop: float(sum(each[start:stop]))
    return lambda start, stop: 0.0


def exchange(profile: Profile, costs: Costs) -> Taken:
    """Return the seconds of one exchange of the run's load."""
    load = _sums(profile.load.tolist())
    return lambda start, stop: costs.exchange(load[stop] - load[start])


def _sums(values: list[int]) -> list[int]:
    """Return the n + 1 prefix sums, in Python's integers, which never overflow."""
    sums = [0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums
