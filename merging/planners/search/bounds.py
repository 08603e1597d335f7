"""Bound the clocks of every plan, so that the search for the optimum leaves out what cannot lead to it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from merging.checks import Reals
from merging.planners.search.tables import Flags, Tables

_COARSE = 4  # of these, every so many are looked at first
WEIGHTS = 9  # looked at for every state; sharper bounds have 8 k + 1 of them, so that every k-th is one of these


@dataclass(frozen=True)
class Bounds:
    """Hold the latest clocks with which a plan can still finish in time, by prefix.

    clock, channel: a state (t, E) after the first j tensors is hopeless if t > clock[j] or E > channel[j];
        both of shape (n + 1,).
    open: per option, [j, i]: whether a merge buffer of the tensors i to j can be part of such a plan.
    finish: when they must end.
    rest: for r weights w from 0 to 1, shape (r, n + 1): no plan from (t, E) ends before
        w t + (1 - w) E + rest[w, j]. None where readiness is the same in every plan.
    """

    clock: Reals
    channel: Reals
    open: tuple[Flags, ...]
    finish: float
    rest: Reals | None = None

    def hopeful(self, j: int, clock: Reals, channel: Reals, *, sharp: bool = False) -> Flags:
        """Return which states (clock, channel) of prefix j can still end by `finish`; `sharp`: by all weights."""
        good = np.asarray((clock <= self.clock[j]) & (channel <= self.channel[j]))
        if self.rest is None:
            return good
        # A few weights leave out most; what they leave is looked at with all of them.
        step = 1 if sharp else (len(self.rest) - 1) // (WEIGHTS - 1)
        for every in (_COARSE * step, step):
            left = good.nonzero()[0]
            if not len(left):
                break
            weights, others = _weights(len(self.rest), every)
            mixed = weights * clock[left]
            mixed += others * channel[left]
            mixed += self.rest[::every, j : j + 1]
            good[left] = mixed.max(axis=0) <= self.finish
        return good

    @property
    def sharp(self) -> bool:
        """Tell whether `hopeful` with `sharp` looks at more weights than without."""
        return self.rest is not None and len(self.rest) > WEIGHTS


def earliest(tables: Tables) -> tuple[Reals, Reals]:
    """Return, per prefix, a lower bound of the compute clock and of the channel clock, each (n + 1,).

    The recursion with both clocks minimised by themselves:

        t[j] = min over i < j of  t[i] + sum of steps + select
        E[j] = min over i < j of  max(E[i], t[i] + sum of steps + select) + channel

    Where readiness is the same in every plan, E[n] is the optimum, up to rounding.
    """
    n = tables.n
    upto = _upto(tables)
    clock, channel = np.zeros(n + 1), np.zeros(n + 1)
    for j in range(n):
        ends, ready = [], []
        for option in tables.options:
            run = upto[option.clock]
            leaves = clock[: j + 1] + (run[j + 1] - run[: j + 1])
            if option.select is not None:
                leaves += option.select[j, : j + 1]
            ends.append((np.maximum(channel[: j + 1], leaves) + option.channel[j, : j + 1]).min())
            ready.append(leaves.min())
        clock[j + 1], channel[j + 1] = min(ready), min(ends)
    return clock, channel


def latest(tables: Tables, clock: Reals, channel: Reals, finish: float, weights: int = WEIGHTS) -> Bounds:
    """Return the bounds of plans that end by `finish`, given `earliest` clocks: the recursion from the end.

        channel'[i] = max over j of  channel'[j] - channel(i..j)
        clock'[i]   = max over j of  min(clock'[j], channel'[j] - channel(i..j)) - steps - select

    over the merge buffers that the earliest clocks can serve in time. More `weights` leave out more states.
    """
    n = tables.n
    upto = _upto(tables)
    late_clock, late_channel = np.full(n + 1, -np.inf), np.full(n + 1, -np.inf)
    late_clock[n] = late_channel[n] = finish
    flags = tuple(np.zeros((n, n), bool) for _ in tables.options)
    for i in range(n - 1, -1, -1):
        for option, flag in zip(tables.options, flags, strict=True):
            run = upto[option.clock]
            takes = run[i + 1 :] - run[i]
            if option.select is not None:
                takes = takes + option.select[i:, i]
            start = late_channel[i + 1 :] - option.channel[i:, i]
            leave = np.minimum(late_clock[i + 1 :], start)
            good = (clock[i] + takes <= leave) & (channel[i] <= start)
            flag[i:, i] = good
            if good.any():
                late_channel[i] = max(late_channel[i], start[good].max())
                late_clock[i] = max(late_clock[i], (leave - takes)[good].max())
    rest = None if tables.fixed else _rest(tables, flags, *_weights(weights))
    return Bounds(late_clock, late_channel, flags, finish, rest)


@functools.cache
def _weights(count: int, every: int = 1) -> tuple[Reals, Reals]:
    """Return every so many of ``count`` weights from 0 to 1, as a column, and what is left to 1 of each."""
    weights = np.linspace(0.0, 1.0, count, dtype=np.float64)[::every, None]
    others = 1 - weights
    weights.flags.writeable = others.flags.writeable = False
    return weights, others


def _rest(tables: Tables, flags: tuple[Flags, ...], weights: Reals, others: Reals) -> Reals:
    """Return `Bounds.rest` over the merge buffers in `flags`: both clocks at once, by Lagrangian weights.

    With T = steps + select and C = channel, a merge buffer gives t' = t + T, E' >= E + C and E' >= t' + C, so
    v t' + (1 - v) E' >= w (t + T) + (1 - w) E + (1 - v) C for all v <= w; the finish is E, of weight 0. Hence

        rest[w, i] = min over j of  w T(i..j) + max over v <= w of ((1 - v) C(i..j) + rest[v, j])
    """
    n = tables.n
    upto = _upto(tables)
    rest = np.full((len(weights), n + 1), np.inf)
    rest[:, n] = -np.inf
    rest[0, n] = 0.0
    for i in range(n - 1, -1, -1):
        for option, flag in zip(tables.options, flags, strict=True):
            j = i + np.flatnonzero(flag[i:, i])
            if len(j):
                takes = upto[option.clock][j + 1] - upto[option.clock][i]
                if option.select is not None:
                    takes = takes + option.select[j, i]
                moved = np.maximum.accumulate(others * option.channel[j, i] + rest[:, j + 1], axis=0)
                rest[:, i] = np.minimum(rest[:, i], (weights * takes + moved).min(axis=1))
    return rest


def _upto(tables: Tables) -> Reals:
    """Return the n + 1 prefix sums of the steps, one row per clock."""
    return np.concatenate([np.zeros((len(tables.steps), 1)), np.cumsum(tables.steps, axis=1)], axis=1)
