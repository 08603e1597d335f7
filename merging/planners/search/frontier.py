# SPDX-License-Identifier: Apache-2.0
"""Search over prefixes of the readiness order, with the set of states that no other state beats.

Beside it are the edges and bounds that it needs, and rules without a search.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from merging.costs import Costs, Profile
from merging.pieces import Pieces
from merging.plan import Elements, Plan, Reals
from merging.planners.search.tables import Flags, Tables

# Edges: the costs of every possible merge buffer on both clocks, as a graph that can be walked in both directions.

Indices = NDArray[np.int64]
FEW = 32  # tensors up to which clocks are compared to the bit
_GRAIN = 1e-13  # of the time of a simple plan: for more tensors, added to each merge buffer, so that fewer are better
NEVER = 1e300  # seconds: of an edge that does not exist, where infinity times a weight of 0 would be no number


@dataclass(frozen=True)
class Edges:
    """Edges: at [i, o, j] with i <= j, the merge buffer of the tensors i to j, sent by option o of the tables.

    It takes a state (t, E) of the prefix i to t + clock, max(E, t + clock) + channel of the prefix j + 1. The edges of
    prefix i are numbered o n + j. Both arrays have the shape (n, o, n).
    """

    clock: Reals
    channel: Reals
    grain: float  # seconds that are added to each of both

    @property
    def n(self) -> int:
        """Return the number of tensors."""
        return len(self.clock)

    @property
    def options(self) -> int:
        """Return the number of send modes of a merge buffer."""
        return self.clock.shape[1]

    def all_open(self) -> Flags:
        """Return the numbers at each prefix of edges below the size limit, as flags, (n, o n)."""
        return np.tile(np.tri(self.n, dtype=bool).T, self.options) & (self.channel.reshape(self.n, -1) < NEVER)

    def reversed(self) -> Edges:
        """Return the same problem from its end: the first tensor is the last, and both clocks change places.

        A plan ends with the longest path that follows the compute clock to one of its merge buffers and the channel
        from there. That is the same path in both directions (of flow shops of two machines: Muth, 1979).
        """
        return Edges(_turned(self.channel), _turned(self.clock), self.grain)


def edges_of(tables: Tables) -> Pieces[Edges]:
    """Return, in pieces, the edges of the tables. Beyond 32 tensors each has the grain added on both clocks."""
    n = tables.n
    clock, channel = np.empty((2, n, len(tables.options), n))
    upto = np.concatenate([np.zeros((len(tables.steps), 1)), np.cumsum(tables.steps, axis=1)], axis=1)
    for number, option in enumerate(tables.options):
        yield
        run = upto[option.clock]
        np.subtract(run[None, 1:], run[:-1, None], out=clock[:, number])
        if option.select is not None:
            clock[:, number] += option.select.T
        np.minimum(option.channel.T, NEVER, out=channel[:, number])
    single = float((clock[0, :, -1] + channel[0, :, -1]).min())
    each = clock[0, :, -1].min() + np.einsum("ioi->io", channel).min(axis=1).sum()
    grain = _GRAIN * min(single, float(each)) if n > FEW else 0.0
    clock += grain
    channel += grain
    return Edges(clock, channel, grain)


def turned(opened: Flags) -> Flags:
    """Return the same edges of the reversed problem."""
    n = len(opened)
    return _turned(opened.reshape(n, -1, n)).reshape(n, -1)


def _turned(values: NDArray[Any]) -> NDArray[Any]:
    """Return the values with that of [n - 1 - j, o, n - 1 - i] at [i, o, j]."""
    return np.ascontiguousarray(values[::-1, :, ::-1].transpose(2, 1, 0))


# Bounds of the end of plans, so that the search excludes edges that cannot lead to the optimum.

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


# The greedy rule of `agmerge`: merge while the channel is busy, after each possible first buffer.

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


# Readiness: when tensors are usable, and seconds of selection from a run of them, for the published rules.

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


# The search over prefixes.

Found = tuple[Plan, float]
"""A plan, and when its last exchange ends."""


class Spent(Exception):
    """Signal: the allowed work is done and the search is not."""


@dataclass
class Work:
    """Number of extensions of states that may still be tried, over several searches.

    An integer, not a time: equal in every process, and so are the results.
    """

    left: int | None = None  # None: any number
    whole: Work | None = None  # of which this is a part

    @property
    def spent(self) -> bool:
        """Return whether nothing is left."""
        return self.left is not None and self.left <= 0

    def spend(self, extensions: int) -> None:
        """Subtract so many. Raises `Spent` where more are wanted than are left, here or of the whole."""
        if self.whole is not None:
            self.whole.spend(extensions)
        if self.left is not None:
            self.left -= extensions
            if self.left < 0:
                raise Spent


def search(
    tables: Tables,
    bounds: Bounds,
    opened: Flags,
    finish: float,
    grain: float,
    work: Work,
    width: int | None = None,
) -> Pieces[Found | None]:
    """Return, in pieces, the plan that ends first, and when; of several one with the fewest merge buffers.

    None: none ends in time.

    A state is (t, E) after the first j tensors, with t the compute and E the channel clock. Every state of prefix i is
    extended by every merge buffer that starts there and is in `opened`; states that cannot end by `finish` are
    dropped, and so are states of a prefix beaten in t and E. With `width`, only so many states of a prefix are
    kept, those with the lowest bounds: a good plan soon, not always the optimum.

    The additions are those of `predict`, in its order, and rounding is monotone: the result is the optimum to the
    bit, and states must be beaten in merge buffers as well. Where each merge buffer takes a `grain` more, as in the
    edges, the fewest come by themselves, among sums in another order, too.

    Raises `Spent` where `work` does not suffice; a search costs an extension per state and merge buffer tried.
    """
    n = tables.n
    flags = np.ascontiguousarray(opened.T)  # at [number of an edge, i]
    states = _Open(len(tables.steps))
    states.add(np.zeros(1), np.zeros(1), np.zeros(1, np.int64), 0)
    history: list[tuple[Indices, Indices, NDArray[np.bool_]]] = []
    for j in range(n):
        yield
        states.advance(tables.steps[:, j])
        clocks, channels, origins, dense = [], [], [], []
        for number, option in enumerate(tables.options):
            chosen = np.flatnonzero(flags[number * n + j].take(states.start))
            if not len(chosen):
                continue
            work.spend(len(chosen))
            start = states.start[chosen]
            leaves = states.clock[option.clock].take(chosen)
            if option.select is not None:
                leaves += option.select[j].take(start)
            leaves += grain
            ends = np.maximum(states.channel.take(chosen), leaves)
            ends += option.channel[j].take(start)
            ends += grain
            clocks.append(leaves)
            channels.append(ends)
            origins.append(chosen)
            dense.append(option.dense[j].take(start))
        if not clocks:
            history.append((np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, bool)))
            continue
        clock, channel, origin = np.concatenate(clocks), np.concatenate(channels), np.concatenate(origins)
        kept = bounds.in_time(j + 1, clock, channel, finish)
        buffers = states.buffers[origin[kept]] + 1
        kept = kept[unbeaten(clock[kept], channel[kept], None if grain else buffers)]
        if width is not None and len(kept) > width:
            kept = kept[bounds.lower(j + 1, clock[kept], channel[kept]).argpartition(width)[:width]]
        origin = origin[kept]
        history.append((states.label[origin], states.start[origin], np.concatenate(dense)[kept]))
        states.add(clock[kept], channel[kept], states.buffers[origin] + 1, j + 1)
    return _best(states, history)


def _best(states: _Open, history: list[tuple[Indices, Indices, NDArray[np.bool_]]]) -> Found | None:
    """Return the plan of the state that ends first, of equals of that with the fewest merge buffers."""
    whole = np.flatnonzero(states.start == len(history))
    if not len(whole):
        return None
    buffers, ends = states.buffers[whole], states.channel[whole]
    last = int(np.lexsort((buffers, ends))[0])
    return _plan(history, last), float(ends[last])


class _Open:
    """States that merge buffers can start from, in arrays that grow.

    After the first `add` there are `clock` (one row each), `channel`, `start` (the prefix), `buffers` (merge
    buffers so far) and `label` (its number within the prefix). Each has `size` columns.
    """

    def __init__(self, clocks: int) -> None:
        self._clock: Reals = np.empty((clocks, 64))  # with room to spare, as the others
        self._channel: Reals = np.empty(64)
        self._whole: Indices = np.empty((3, 64), np.int64)  # start, buffers, label
        self.size = 0  # states

    def add(self, clock: Reals, channel: Reals, buffers: Indices, start: int) -> None:
        """Append the states of prefix `start`."""
        first, self.size = self.size, self.size + len(clock)
        if self.size > len(self._channel):
            more = max(self.size, 2 * len(self._channel)) - len(self._channel)
            self._clock = np.pad(self._clock, ((0, 0), (0, more)))
            self._channel = np.pad(self._channel, (0, more))
            self._whole = np.pad(self._whole, ((0, 0), (0, more)))
        new = slice(first, self.size)
        self._clock[:, new], self._channel[new] = clock, channel
        self._whole[0, new], self._whole[1, new] = start, buffers
        self._whole[2, new] = np.arange(len(clock))
        self.clock, self.channel = self._clock[:, : self.size], self._channel[: self.size]
        self.start, self.buffers, self.label = self._whole[:, : self.size]

    def advance(self, steps: Reals) -> None:
        """Advance the compute clocks by one more tensor."""
        self.clock += steps[:, None]


def unbeaten(clock: Reals, channel: Reals, buffers: Indices | None = None) -> Indices:
    """Return the indices of the states that no other state equals or beats in all given figures.

    Of equal states the first is kept. Without `buffers`, in the order of clocks; else of merge buffers.
    """
    if len(clock) < 2:
        return np.arange(len(clock))
    if buffers is None:
        return _staircase(clock, channel)
    if clock.min() == clock.max():
        return _staircase(buffers, channel)
    fewer: Indices = np.zeros(0, np.int64)  # unbeaten in both clocks among all states with fewer merge buffers
    kept = []
    for count in np.unique(buffers):
        same = np.flatnonzero(buffers == count)
        same = same[_staircase(clock[same], channel[same])]
        if len(fewer):
            rank = np.searchsorted(clock[fewer], clock[same], side="right") - 1
            same = same[(rank < 0) | (channel[fewer[rank]] > channel[same])]
        kept.append(same)
        both = np.concatenate([fewer, same])
        fewer = both[_staircase(clock[both], channel[both])]
    return np.concatenate(kept)


def _staircase(first: Reals | Indices, second: Reals) -> Indices:
    """Return the indices of the pairs that no other pair equals or beats in both numbers, in order of the first."""
    order = first.argsort(kind="stable")
    values = second[order]
    kept = np.ones(len(order), bool)
    kept[1:] = values[1:] < np.minimum.accumulate(values)[:-1]
    order = order[kept]
    values = first[order]
    last = np.ones(len(order), bool)
    last[:-1] = values[1:] > values[:-1]  # of those that are equal in the first, the last is lowest in the second
    return np.asarray(order[last])


def _plan(history: list[tuple[Indices, Indices, NDArray[np.bool_]]], label: int) -> Plan:
    """Return the plan that led to the state `label` of the last prefix."""
    counts: list[int] = []
    flags: list[bool] = []
    stop = len(history)
    while stop:
        labels, starts, dense = history[stop - 1]
        start = int(starts[label])
        counts.append(stop - start)
        flags.append(bool(dense[label]))
        label, stop = int(labels[label]), start
    return Plan(tuple(counts[::-1]), tuple(flags[::-1]))
