# SPDX-License-Identifier: Apache-2.0
"""AGTF planner: merge where it helps, unless selection from the merged tensors would leave a larger residual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from merging.costs import Costs, Profile
from merging.plan import Plan, Reals, flag
from merging.planner import Planner
from merging.planners.search.frontier import unbeaten, usable

Counts = NDArray[np.int64]
STEPS = 1_000_000  # in which the noise of one tensor per merge buffer is counted


@dataclass(frozen=True, repr=False, kw_only=True)
class AGTF(Planner):
    """Planner of the earliest end among plans with at most the noise of one tensor per merge buffer.

    profile.noise is the residual energy of each tensor after selection at its density K / p, load / numel:
    the (p / K - 1) g of AGTF, with g the tensor's weight. A merge buffer of several keeps their K and leaves
    (sum p / sum K - 1) sum g. Without noise, or at equal densities, nothing is forbidden. Exempt tensors
    (work 0) are not selected from and do not count here. `loads` in merging.dense_cutoff turns gradient
    energies into K.

    Labels are (channel clock, noise): those beaten in both are dropped. Noise is counted in millionths of
    the total and rounded up, so the limit is kept and equal values stay equal.

    Source: AGTF (SNA-MGS), Journal of Jilin University (Science) 63(5), 2025, 1356, and its code's dp_agtf.
    `published=True` is that code's recursion: one label per prefix, the first merging everything and never
    held to the limit. On C = 5 + K, b=[0,1,2], p=[20,40,100], K=[5,2,5], noise=[15,19,76] it returns one
    merge buffer: finish 20, but noise 123.3 above the 110 allowed; the labels find {0},{1,2} at 22. Like
    the original, neither counts selection when behind; ahead, it is part of when a tensor is ready.
    """

    name: ClassVar[str] = "agtf"
    published: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "published", flag("agtf: published", self.published))

    def partition(self, profile: Profile, costs: Costs, mode: str) -> Plan:
        ready = usable(profile, costs, mode)
        n = len(profile)
        upto = np.concatenate([[0], np.cumsum(profile.load)])
        channel = np.full((n, n), np.inf)
        for j in range(n):
            channel[j, : j + 1] = costs.exchange(upto[j + 1] - upto[: j + 1])
        starts = (one_label if self.published else pareto)(ready, channel, excess(profile))
        return Plan(tuple(stop - start for start, stop in zip(starts, [*starts[1:], n], strict=True)))


def excess(profile: Profile) -> Counts:
    """Return at [j, i] the noise that merging tensors i to j, i <= j, adds, in STEPS of the total."""
    n = len(profile)
    selected = profile.work > 0  # exempt tensors leave no residual, and their load is not a K
    noise = np.zeros(n) if profile.noise is None else np.where(selected, profile.noise, 0.0)
    total = float(noise.sum())
    if not total:
        return np.zeros((n, n), np.int64)
    numel, load = (np.where(selected, values, 0).astype(np.float64) for values in (profile.numel, profile.load))
    lost = numel - load
    partly = (load > 0) & (lost > 0)  # the others' noise is the same in every plan
    weight = np.divide(noise * load, lost, out=np.zeros(n), where=partly)
    alone = np.where(partly, noise, 0.0)
    p, k, g, parts = (np.concatenate([[0.0], np.cumsum(values)]) for values in (numel, load, weight, alone))

    def sums(upto: Reals) -> Reals:
        return np.asarray(upto[1:, None] - upto[None, :-1])

    kept = sums(k)
    merged = np.divide(np.maximum(sums(p) - kept, 0), kept, out=np.zeros((n, n)), where=kept > 0) * sums(g)
    more = np.ceil(STEPS * ((merged - sums(parts)) / total) - 1e-3)
    more[np.diag_indices(n)] = 0
    more[np.triu_indices(n, 1)] = 0
    return np.asarray(np.clip(more, -(2**40), 2**40), dtype=np.int64)


def pareto(ready: Reals, channel: Reals, more: Counts) -> list[int]:
    """Return the first tensor of every merge buffer of the plan that ends first with no more noise."""
    n = len(ready)
    # From each prefix on, the remainder takes at least so long, and adds at least so much.
    least, calm = np.zeros(n + 1), np.zeros(n + 1, np.int64)
    for i in range(n - 1, -1, -1):
        least[i] = (channel[i:, i] + least[i + 1 :]).min()
        calm[i] = (more[i:, i] + calm[i + 1 :]).min()
    finish = 0.0
    for j in range(n):
        finish = max(finish, ready[j]) + channel[j, j]
    finish *= 1 + 1e-12
    ends: Reals = np.zeros(1)  # of all labels so far, with their noise, their prefix and their number in it
    noise: Counts = np.zeros(1, np.int64)
    start: Counts = np.zeros(1, np.int64)
    number: Counts = np.zeros(1, np.int64)
    history: list[tuple[Counts, Counts]] = []
    for j in range(n):
        later = np.maximum(ends, ready[j]) + channel[j][start]
        louder = noise + more[j][start]
        good = np.flatnonzero((louder + calm[j + 1] <= 0) & (later + least[j + 1] <= finish))
        kept = good[unbeaten(later[good], louder[good].astype(np.float64))]
        history.append((start[kept], number[kept]))
        ends, noise = np.append(ends, later[kept]), np.append(noise, louder[kept])
        start = np.append(start, np.full(len(kept), j + 1))
        number = np.append(number, np.arange(len(kept)))
    stop, label = n, int(ends[start == n].argmin())
    starts: list[int] = []
    while stop:
        origin, before = history[stop - 1]
        stop, label = int(origin[label]), int(before[label])
        starts.append(stop)
    return starts[::-1]


def one_label(ready: Reals, channel: Reals, more: Counts) -> list[int]:
    """Return the same by the published recursion, which may miss the limit, and the optimum within it."""
    ends, noise, plans = [0.0], [0], [[0][:0]]
    for j in range(len(ready)):
        best, loud, plan = max(0.0, float(ready[j])) + float(channel[j, 0]), int(more[j, 0]), [0]
        for i in range(1, j + 1):
            later = max(ends[i], float(ready[j])) + float(channel[j, i])
            if later < best and noise[i] + int(more[j, i]) <= 0:
                best, loud, plan = later, noise[i] + int(more[j, i]), [*plans[i], i]
        ends.append(best)
        noise.append(loud)
        plans.append(plan)
    return plans[-1]
