# SPDX-License-Identifier: Apache-2.0
"""Tables of the costs of every possible merge buffer, and of clocks that are known before any plan is chosen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from merging.costs import Cost, Costs, Profile
from merging.pieces import Pieces
from merging.plan import Elements, Reals
from merging.timeline import LIMIT

_ROWS = 64  # of a table, made at once, up to the diagonal

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Option:
    """Send mode of a merge buffer; [j, i] is about the merge buffer of the tensors i to j, i <= j.

    clock: which row of `Tables.steps` the compute clock follows inside the merge buffer.
    select: seconds of the processor after the last tensor, for selection and the message, or None for none.
    channel: seconds of the exchange; infinite for i > j and for 2**31 elements or more.
    dense: whether the merge buffer goes dense.
    """

    clock: int
    select: Reals | None
    channel: Reals
    dense: Flags


@dataclass(frozen=True)
class Tables:
    """Tables of all that `predict` reads of a profile and costs in one mode.

    steps: seconds that the compute clock advances at each tensor, one row per clock, shape (c, n).
    options: the send modes of a merge buffer.
    fixed: whether the readiness of a tensor is the same in every plan.
    """

    steps: Reals
    options: tuple[Option, ...]
    fixed: bool

    @property
    def n(self) -> int:
        """Return the number of tensors."""
        return int(self.steps.shape[1])


def tables(profile: Profile, costs: Costs, mode: str) -> Pieces[Tables]:
    """Return, in pieces, the tables of one mode; O(n^2) memory, and n / 64 calls of each cost function."""
    n = len(profile)
    barred = _sums(profile.numel) >= LIMIT
    barred[np.triu_indices(n, 1)] = True
    sparse = yield from _table(costs.exchange, profile.load, barred)
    wire = None if costs.dense is None else (yield from _table(costs.dense, profile.numel, barred))
    no, yes = np.zeros((1, 1), bool), np.ones((1, 1), bool)
    plain = profile.backward[None, :]
    message = start = None
    if costs.message is not None:
        message = yield from _table(costs.message, profile.load, barred, outside=0.0)
        start = np.broadcast_to(np.full((1, 1), costs.message(0)), (n, n))
    if mode == "dense" and message is None:
        if wire is None:
            return Tables(plain, (Option(0, None, sparse, np.broadcast_to(no, (n, n))),), True)
        return Tables(plain, (Option(0, None, np.minimum(sparse, wire), wire < sparse),), True)
    select = message
    if mode == "behind":
        selection = yield from _table(costs.sparsify, profile.work, barred, outside=0.0)
        select = selection if message is None else selection + message
    ahead = plain + costs.sparsify(profile.work) if mode == "ahead" else plain
    options = [Option(0, select, sparse, np.broadcast_to(no, (n, n)))]
    steps = ahead
    if wire is not None:
        steps = np.concatenate([ahead, plain]) if mode == "ahead" else plain
        options.append(Option(len(steps) - 1, start, wire, np.broadcast_to(yes, (n, n))))
    return Tables(steps, tuple(options), mode == "ahead" and wire is None and message is None)


def _sums(values: Elements) -> Elements:
    """Return the sum of values i to j at [j, i]; entries with i > j have no meaning."""
    upto = np.concatenate([[0], np.cumsum(values)])
    return np.asarray(upto[1:, None] - upto[None, :-1], dtype=np.int64)


def _table(cost: Cost, values: Elements, barred: Flags, outside: float = np.inf) -> Pieces[Reals]:
    """Return, in pieces, the cost of the sum of values i to j at [j, i]; `outside` where it is `barred`."""
    n = len(values)
    upto = np.concatenate([[0], np.cumsum(values)])
    table = np.empty((n, n))
    for first in range(0, n, _ROWS):
        yield
        last = min(n, first + _ROWS)
        sums = upto[first + 1 : last + 1, None] - upto[None, :last]
        sums[barred[first:last, :last]] = 0
        table[first:last, :last] = cost(sums)
    table[barred] = outside
    return table
