# SPDX-License-Identifier: Apache-2.0
"""Search over prefixes of the readiness order, with the set of states that no other state beats."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from merging.checks import Reals
from merging.pieces import Pieces
from merging.plan import Plan
from merging.planners.search.bounds import Bounds
from merging.planners.search.edges import Indices
from merging.planners.search.tables import Flags, Tables

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
