# SPDX-License-Identifier: Apache-2.0
"""Intra-worker rule of `agmerge`: merge while the channel is busy, after each possible first buffer."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from merging.checks import Elements, Reals
from merging.costs import Costs
from merging.pieces import Pieces
from merging.plan import Plan
from merging.profile import Profile

# Of backward, during which all merge buffers go dense.
_SHARES = (0.0, 0.5, 0.75, 0.9, 0.97, 1.0)
_EQUAL = 1e-12  # of the finish: difference of sums in another order

Marks = NDArray[np.uint8]


def greedy(profile: Profile, costs: Costs, mode: str) -> Pieces[Plan]:
    """Return, in pieces, a plan that leaves the channel idle no more once in use: O(n^2) steps in numpy, n^2 bytes.

    For every f in 1..n: the first f tensors are a merge buffer. From then on each is closed at the first
    tensor with which it is ready (selection included) no sooner than the channel is free. The f with the first
    end of the last exchange is kept; of equals, that with the fewest merge buffers. f = n is one merge buffer, so
    `single` never ends sooner.

    Where merge buffers may go dense, each is sent in the mode that ends it sooner, and waits until it is ready for
    that. By itself that ended up to 41 % later than the optimum: selection delays all that follows, and an end
    does not show it. So the same is tried with all of them dense until a share of backward, for a few shares up
    to the whole, and with none dense; that left 4 %.
    """
    found = [(yield from _follow(profile, costs, mode, None))]
    if costs.dense is not None:
        backward = np.cumsum(profile.backward)
        stops = np.searchsorted(backward, np.multiply(_SHARES, backward[-1]))
        for stop in sorted({*stops.tolist(), len(profile)}):
            found.append((yield from _follow(profile, costs, mode, stop)))
    soonest = min(float(ends.min()) for ends, _ in found) * (1 + _EQUAL)
    plans = [_plan_of_marks(marks[:, f]) for ends, marks in found for f in _fewest(ends, marks, soonest)]
    return min(plans, key=lambda plan: len(plan.counts))


def _follow(profile: Profile, costs: Costs, mode: str, until: int | None) -> Pieces[tuple[Reals, Marks]]:
    """Follow the rule in n lanes, in pieces; one per first merge buffer.

    until: merge buffers that close before this tensor are dense, later ones in the mode that ends sooner; None: none.

    Returns when the last exchange of each lane ends, shape (n,), and at [j, f] whether lane f closes a merge
    buffer after tensor j: 0 no, 1 sparse, 2 dense. Lane f has f + 1 tensors in its first, so is 0 above.
    """
    n = len(profile)
    work, load, numel = (_upto(values) for values in (profile.work, profile.load, profile.numel))
    message = costs.message or (lambda elements: 0.0 * elements)
    begin = float(message(0))
    backward = profile.backward.tolist()
    each = costs.sparsify(profile.work).tolist() if mode == "ahead" else [0.0] * n
    start = np.zeros(n, np.int64)  # of the open merge buffer
    clock, select, channel = np.zeros(n), np.zeros(n), np.zeros(n)  # select: since `start`, on top of the clock
    marks = np.zeros((n, n), np.uint8)
    for j in range(n):
        yield
        clock += backward[j]
        select += each[j]
        if mode == "behind":
            select[: j + 1] = costs.sparsify(work[j + 1] - work[start[: j + 1]])
        due = clock[: j + 1] + select[: j + 1] + message(load[j + 1] - load[start[: j + 1]]) >= channel[: j + 1]
        due[j:] = True
        lane = np.arange(n) if j == n - 1 else np.flatnonzero(due)
        first, free = start[lane], channel[lane]
        choices = (False,) if until is None else (True,) if j < until else (False, True)
        sparse = select[lane] + message(load[j + 1] - load[first])
        ready = np.stack([clock[lane] + (begin if dense else sparse) for dense in choices])
        ends = np.maximum(free, ready)
        for row, dense in zip(ends, choices, strict=True):
            if dense and costs.dense is not None:
                row += costs.dense(numel[j + 1] - numel[first])
            else:
                row += costs.exchange(load[j + 1] - load[first])
        best = ends.argmin(axis=0), np.arange(len(lane))
        now = (ready[best] >= free) | (lane == j) | (j == n - 1)
        lane, best = lane[now], (best[0][now], best[1][now])
        clock[lane], channel[lane], select[lane], start[lane] = ready[best], ends[best], 0.0, j + 1
        marks[j, lane] = 1 + np.array(choices)[best[0]]
    return channel, marks


def _fewest(ends: Reals, marks: Marks, soonest: float) -> list[int]:
    """Return the lane with the fewest merge buffers among those that end by `soonest`, in a list; or none."""
    lanes = np.flatnonzero(ends <= soonest)
    return [int(lanes[np.count_nonzero(marks[:, lanes], axis=0).argmin()])] if len(lanes) else []


def _plan_of_marks(marks: Marks) -> Plan:
    """Return the plan with merge buffers that end at the marked tensors; 2 marks a dense one."""
    stops = np.flatnonzero(marks)
    return Plan(tuple(np.diff(stops, prepend=-1).tolist()), tuple((marks[stops] == 2).tolist()))


def _upto(values: Elements) -> Elements:
    """Return the n + 1 prefix sums."""
    return np.array([0, *accumulate(values.tolist())], dtype=np.int64)
