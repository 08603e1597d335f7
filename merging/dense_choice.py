# SPDX-License-Identifier: Apache-2.0
"""Choice between dense and sparse, merge buffer by merge buffer, for a given partition."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from merging.checks import Reals
from merging.costs import Costs
from merging.pieces import Pieces, in_pieces
from merging.plan import Plan
from merging.profile import Profile
from merging.timeline import check_mode

WIDEST = 256  # states kept of a prefix

Indices = NDArray[np.int64]


@in_pieces
def choose_dense(plan: Plan, profile: Profile, costs: Costs, mode: str) -> Pieces[Plan]:
    """Return `plan` with the dense flags with which it is predicted to end first; the fewest of equals.

    Flags and parts that `plan` has are dropped. Without `costs.dense` nothing goes dense; in mode "dense" a flag
    only says which cost is smaller. A state is (t, E), the clocks of `predict`; those beaten in both are dropped, so
    the result is the optimum over all 2^m flags for up to 256 states a merge buffer, more than occur in practice.

    Raises ValueError for an unknown mode and for a plan that does not fit the profile.
    """
    check_mode(mode)
    plan.check(len(profile), profile.names)
    bare = replace(plan, dense=(False,) * len(plan.counts), parts=())
    if costs.dense is None:
        return bare
    selection = costs.sparsify(profile.work)
    message = costs.message or (lambda elements: 0.0)
    clock, channel, flags = np.zeros(1), np.zeros(1), np.zeros(1, np.int64)  # of each state; flags: how many are set
    history: list[Indices] = []  # by merge buffer, of each state: twice its number before, and 1 more if dense
    for start, stop in plan.bounds:
        yield
        run = slice(start, stop)
        backward = float(profile.backward[run].sum())
        load, selects = int(profile.load[run].sum()), 0.0
        if mode == "ahead":
            selects = float(selection[run].sum())
        elif mode == "behind":
            selects = costs.sparsify(int(profile.work[run].sum()))
        ready = np.array([backward + selects + message(load), backward + message(0)])
        takes = np.array([costs.exchange(load), costs.dense(int(profile.numel[run].sum()))])
        # Each state sparse, then dense.
        leaves = (clock[:, None] + ready).ravel()
        ends = (np.maximum(channel[:, None], leaves.reshape(-1, 2)) + takes).ravel()
        counts = (flags[:, None] + np.array([0, 1])).ravel()
        kept = unbeaten(leaves, ends, counts)
        clock, channel, flags = leaves[kept], ends[kept], counts[kept]
        history.append(kept)
    state = int(np.lexsort((flags, channel))[0])
    dense = []
    for kept in reversed(history):
        state, flag = divmod(int(kept[state]), 2)
        dense.append(bool(flag))
    return replace(bare, dense=tuple(reversed(dense)))


def unbeaten(clock: Reals, channel: Reals, flags: Indices) -> Indices:
    """Return the states that no other equals or beats in both clocks, by clock, at most WIDEST, spread evenly.

    Of equal ones the one with the fewest flags is kept, then the first.
    """
    order = np.lexsort((flags, channel, clock))
    values = channel[order]
    better = np.ones(len(order), bool)
    better[1:] = values[1:] < np.minimum.accumulate(values)[:-1]
    kept: Indices = order[better]
    return kept if len(kept) <= WIDEST else kept[np.linspace(0, len(kept) - 1, WIDEST).astype(int)]
