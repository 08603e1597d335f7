"""Choose dense or sparse, merge buffer by merge buffer, where the partition is given."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from merging.costs import Costs
from merging.plan import Plan
from merging.profile import Profile
from merging.timeline import check_mode

WIDEST = 256  # states kept of a prefix

State = tuple[float, float, tuple[bool, ...]]
"""Compute clock, channel clock, and the choices so far."""


def choose_dense(plan: Plan, profile: Profile, costs: Costs, mode: str) -> Plan:
    """Return `plan` with the dense flags with which it is predicted to end first; the fewest of equals.

    Flags and parts that `plan` has are dropped. Without `costs.dense` nothing goes dense; in mode "dense" a flag
    only says which cost is smaller. A state is (t, E), the clocks of `predict`; those beaten in both are dropped, so
    the result is the optimum over all 2^m flags for up to 256 states a merge buffer, which is more than are met.

    Raises ValueError for an unknown mode and for a plan that does not fit the profile.
    """
    check_mode(mode)
    plan.check(len(profile), profile.names)
    bare = replace(plan, dense=(False,) * len(plan.counts), parts=())
    if costs.dense is None:
        return bare
    selection = costs.sparsify(profile.work)
    message = costs.message or (lambda elements: 0.0)
    states: list[State] = [(0.0, 0.0, ())]
    for start, stop in plan.bounds:
        run = slice(start, stop)
        backward = float(profile.backward[run].sum())
        load, selects = int(profile.load[run].sum()), 0.0
        if mode == "ahead":
            selects = float(selection[run].sum())
        elif mode == "behind":
            selects = costs.sparsify(int(profile.work[run].sum()))
        options = (
            (False, backward + selects + message(load), costs.exchange(load)),
            (True, backward + message(0), costs.dense(int(profile.numel[run].sum()))),
        )
        states = unbeaten(
            [
                (clock + ready, max(channel, clock + ready) + takes, (*flags, flag))
                for clock, channel, flags in states
                for flag, ready, takes in options
            ]
        )
    return replace(bare, dense=min(states, key=lambda state: (state[1], sum(state[2])))[2])


def unbeaten(states: list[State]) -> list[State]:
    """Return the states that none equals or beats in both clocks, at most WIDEST, spread evenly."""
    kept: list[State] = []
    for state in sorted(states, key=lambda state: (state[0], state[1], sum(state[2]))):
        if not kept or state[1] < kept[-1][1]:
            kept.append(state)
    if len(kept) <= WIDEST:
        return kept
    return [kept[i] for i in np.linspace(0, len(kept) - 1, WIDEST).astype(int)]
