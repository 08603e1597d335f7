"""When each merge buffer is ready, starts and ends under a cost model: what every planner minimises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from merging.checks import Elements, Reals
from merging.costs import Costs
from merging.plan import Plan
from merging.profile import Profile

MODES = ("dense", "ahead", "behind")


class Span(NamedTuple):
    """One merge buffer, in seconds since backward began: ready to leave, exchange starts, exchange ends."""

    ready: float
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The predicted step, in seconds since backward began: one span per merge buffer, in plan order."""

    spans: tuple[Span, ...]

    @property
    def finish(self) -> float:
        """Return when the last exchange ends."""
        return self.spans[-1].end


def predict(plan: Plan, profile: Profile, costs: Costs, mode: str) -> Timeline:
    """Return the timeline of one step: a compute clock t, a channel clock E, both 0 at first.

    For each merge buffer G in plan order, with b, S and C for backward, sparsify and exchange:

        dense     t += b_i             for each tensor i
        ahead     t += b_i + S(work_i) for each tensor i: selection runs in the stream of backward
        behind    t += b_i             for each tensor i, then t += S(sum of work over G)
        all       E = max(E, t) + C(sum of load over G)

    A merge buffer with `plan.dense` set costs no S, and costs.dense(sum of numel over G) instead of C.
    Raises ValueError for an unknown mode, a plan that does not fit the profile, and a dense merge buffer
    without costs.dense.
    """
    check_mode(mode)
    plan.check(len(profile), profile.names)
    tensors, buffers = _selection(plan, profile, costs, mode)
    # One clock through all additions, in the order of the formulas: plans that agree on when a tensor is
    # ready then agree to the bit. A merge buffer's own term comes after its last tensor.
    stops = np.cumsum(plan.counts)
    clock = np.cumsum(np.insert(profile.backward + tensors, stops, buffers))
    ready = clock[stops + np.arange(len(stops))]
    spans = []
    free = 0.0
    for leaves, takes in zip(ready.tolist(), _exchange(plan, profile, costs).tolist(), strict=True):
        start = max(free, leaves)
        free = start + takes
        spans.append(Span(leaves, start, free))
    return Timeline(tuple(spans))


def check_mode(mode: str) -> None:
    """Raise ValueError unless `mode` is one that `predict` knows."""
    if mode == "dear":
        raise ValueError(f"mode 'dear' is not built yet: use one of {', '.join(MODES)}")
    if mode not in MODES:
        raise ValueError(f"there is no mode {mode!r}: use one of {', '.join(MODES)}")


def _selection(plan: Plan, profile: Profile, costs: Costs, mode: str) -> tuple[Reals, Reals]:
    """Return seconds of selection after each tensor, shape (n,), and after each merge buffer, shape (m,)."""
    tensors: Reals = np.zeros(len(profile))
    buffers: Reals = np.zeros(len(plan.counts))
    if mode == "ahead":
        tensors = np.where(np.repeat(plan.dense, plan.counts), 0.0, costs.sparsify(profile.work))
    elif mode == "behind":
        buffers = np.where(plan.dense, 0.0, costs.sparsify(_totals(profile.work, plan)))
    return tensors, buffers


def _exchange(plan: Plan, profile: Profile, costs: Costs) -> Reals:
    """Return seconds of each merge buffer's exchange, shape (m,)."""
    sparse = costs.exchange(_totals(profile.load, plan))
    if not any(plan.dense):
        return sparse
    if costs.dense is None:
        raise ValueError(
            f"merge buffer {plan.dense.index(True)} goes dense, and costs.dense is None: give the dense cost"
        )
    return np.where(plan.dense, costs.dense(_totals(profile.numel, plan)), sparse)


def _totals(values: Elements, plan: Plan) -> Elements:
    """Return the sum of `values`, shape (n,), over each merge buffer, shape (m,)."""
    return np.add.reduceat(values, [start for start, _ in plan.bounds])
