# SPDX-License-Identifier: Apache-2.0
"""Lower bounds of the end of plans, so that the search for the optimum excludes edges that cannot lead to it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from merging.checks import Reals
from merging.pieces import Pieces
from merging.planners.search.edges import NEVER, Edges, Indices
from merging.planners.search.tables import Flags

Path = list[tuple[int, int, int]]
"""Merge buffers: first tensor, last tensor, option."""


@dataclass(frozen=True)
class Bounds:
    """Lower bounds of the finish, by Lagrangian weights, and the merge buffers that they come from.

    remaining: for r weights w, evenly from 0 to 1, shape (r, n + 1): no plan from a state (t, E) of prefix i ends
        before w t + (1 - w) E + remaining[w, i]. Concave in w, so that few of them suffice.
    best: the number of the edge of prefix i that it comes from, (r, n).
    late: of a plan that ends in time, the latest compute and channel clock of each prefix, (2, n + 1).
    """

    remaining: Reals
    best: Indices
    late: Reals

    def lower(self, i: int, clock: Reals, channel: Reals) -> Reals:
        """Return a time before which no plan ends that continues a state (clock, channel) of prefix i, each (k,)."""
        ahead = clock - channel
        weight = self._turns[i].searchsorted(ahead)
        found: Reals = self.remaining[weight, i]
        found += channel
        found += ahead * (weight / (len(self.remaining) - 1))
        return found

    def in_time(self, i: int, clock: Reals, channel: Reals, finish: float) -> Indices:
        """Return the states of prefix i that can still end by `finish`, which is not later than that of `late`."""
        good = ((clock <= self.late[0, i]) & (channel <= self.late[1, i])).nonzero()[0]
        return np.asarray(good[self.lower(i, clock[good], channel[good]) <= finish])

    def follow(self, edges: Edges, shift: int = 0) -> tuple[Path, float]:
        """Return the plan that follows, from each state, the edge of the bound there; and when it ends.

        `shift`: follow the edge of the weight so many numbers away instead.
        """
        n, i, clock, channel, path = edges.n, 0, 0.0, 0.0, []
        while i < n:
            weight = int(self._turns[i].searchsorted(clock - channel)) + shift
            option, last = divmod(int(self.best[min(max(weight, 0), len(self.best) - 1), i]), n)
            clock += float(edges.clock[i, option, last])
            channel = max(channel, clock) + float(edges.channel[i, option, last])
            path.append((i, last, option))
            i = last + 1
        return path, channel

    @functools.cached_property
    def _turns(self) -> Reals:
        """Return, by prefix, at which t - E the next weight gives the larger bound, ascending, (n + 1, r - 1)."""
        return np.ascontiguousarray(((self.remaining[:-1] - self.remaining[1:]) * (len(self.remaining) - 1)).T)


def bound(
    edges: Edges, weights: int, opened: Flags, behind: Bounds | None, finish: float
) -> Pieces[tuple[Bounds, Flags]]:
    """Return, in pieces, bounds over the edges in `opened`, and those that can be part of a plan that ends by `finish`.

    With T = clock and C = channel, an edge gives t' = t + T, E' >= E + C and E' >= t' + C, hence
    v t' + (1 - v) E' >= w (t + T) + (1 - w) E + (1 - v) C for all v <= w, and

        remaining[w, i] = min over edges of  w T + max over v <= w of ((1 - v) C + remaining[v, j + 1])

    The latest clocks are the recursion from the end, over the edges that the earliest clocks can take in time:

        channel[i] = max over edges of  channel[j + 1] - C
        clock[i]   = max over edges of  min(clock[j + 1], channel[j + 1] - C) - T

    weights: how many. More are closer.
    behind: bounds of the reversed edges, which bound the prefix before an edge; None: not known.
    """
    n = edges.n
    w = np.linspace(0.0, 1.0, weights)[:, None]
    others, rows = 1 - w, np.arange(weights)
    remaining, best = np.zeros((weights, n + 1)), np.zeros((weights, n), np.int64)
    late = np.full((2, n + 1), finish)
    before = None if behind is None else _finer(behind.remaining, weights)[::-1, ::-1]
    still = np.zeros_like(opened)
    for i in range(n - 1, -1, -1):
        yield
        numbers = opened[i].nonzero()[0]
        if before is not None:
            following = numbers % n + 1
            start = late[1].take(following) - edges.channel[i].take(numbers)
            leave = np.minimum(late[0].take(following), start) - edges.clock[i].take(numbers)
            good = (leave >= before[-1, i]) & (start >= before[0, i])
            numbers, start, leave = numbers[good], start[good], leave[good]
        ends = others * edges.channel[i].take(numbers)
        ends += remaining.take(numbers % n + 1, axis=1)
        np.maximum.accumulate(ends, axis=0, out=ends)
        ends += w * edges.clock[i].take(numbers)
        if before is not None:
            good = (ends + before[:, i, None]).max(axis=0) <= finish
            numbers, start, leave = numbers[good], start[good], leave[good]
            ends = ends[:, good]
            late[:, i] = leave.max(initial=-NEVER), start.max(initial=-NEVER)
        still[i, numbers] = True
        if not len(numbers):
            remaining[:, i] = NEVER
            continue
        place = ends.argmin(axis=1)
        remaining[:, i], best[:, i] = ends[rows, place], numbers[place]
    return Bounds(remaining, best, late), still


def _finer(remaining: Reals, weights: int) -> Reals:
    """Return the bounds for more weights, 8 k + 1 for 8 + 1: the concave lies above the lines between its points."""
    every = (weights - 1) // (len(remaining) - 1)
    fine = np.empty((weights, remaining.shape[1]))
    for part in range(every):
        fine[part:-1:every] = remaining[:-1] * (1 - part / every) + remaining[1:] * (part / every)
    fine[-1] = remaining[-1]
    return fine
