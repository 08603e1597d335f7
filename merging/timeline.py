# SPDX-License-Identifier: Apache-2.0
"""Predicted times at which each merge buffer is ready, starts and ends: the quantity that every planner minimises."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from merging.checks import Elements, Reals
from merging.costs import Costs
from merging.plan import Plan
from merging.profile import Profile

MODES = ("dense", "ahead", "behind")
"""The modes that every planner plans for; "dear" is the fourth that `predict` knows."""


class Span(NamedTuple):
    """Predicted times of one merge buffer, in seconds since the backward pass began."""

    ready: float  # to leave
    start: float  # of its exchange
    end: float  # of its exchange


@dataclass(frozen=True)
class Timeline:
    """Predicted times of one step, in seconds since the backward pass began. ``spans`` has one span per merge buffer.

    With mode ``"dear"``, ``spans`` are the reduce-scatters and ``gathers`` the all-gathers. ``step`` is the end of the
    next forward pass, and None in other modes.
    """

    spans: tuple[Span, ...]
    gathers: tuple[Span, ...] = ()
    step: float | None = None

    @property
    def finish(self) -> float:
        """Return when the last exchange ends. In mode ``"dear"``: when the next forward pass ends."""
        return self.spans[-1].end if self.step is None else self.step


def predict(plan: Plan, profile: Profile, costs: Costs, mode: str) -> Timeline:
    """Predict the times of one step.

    Args:
        plan (Plan): The merge buffers.
        profile (Profile): Sizes and times of the tensors.
        costs (Costs): Costs of selection and messages.
        mode (str): ``"dense"``, ``"ahead"``, ``"behind"`` or ``"dear"``.

    Returns:
        A :class:`Timeline`.

    Raises:
        ValueError: For an unknown mode, a plan that does not fit the profile, an uncompressed merge buffer without
            ``costs.dense``, several tensors ``"ahead"`` in parts, or mode ``"dear"`` without ``profile.forward``.

    The model has a clock t of the processor and a clock E of the network, both 0 at first. For each merge buffer G in
    plan order, with b, S, M and C for backward, ``sparsify``, ``message`` and ``exchange``::

        dense     t += b_i             for each tensor i
        ahead     t += b_i + S(work_i) for each tensor i: selection runs in the stream of backward
        behind    t += b_i             for each tensor i, then t += S(sum of work over G)
        all       t += M(sum of load over G) if there is costs.message, E = max(E, t) + C(sum of load over G)

    In modes ``"ahead"`` and ``"behind"`` a merge buffer with P > 1 parts is selected and sent in P messages. The next
    part is selected while the one before is sent. The span begins when the first part is ready, and ends with the last
    one. Work and load are rounded up to integers. With ``"ahead"`` such a merge buffer has one tensor. Without work
    there is one part::

        parts     P times: t += S(work / P) + M(load / P), E = max(E, t) + C(load / P)    after b_i for each tensor i

    Mode ``"dear"`` is dense with C in two halves. The reduce-scatters are as above. After the last one, the all-gathers
    follow each other, last merge buffer first, in the order of the forward pass, which has the clock u::

        dear      A = A + C / 2, u = max(u, A) + sum of forward over G    with A = u = E at first

    An uncompressed merge buffer costs no S, M(0), and ``costs.dense(sum of numel over G)`` instead of C.
    """
    check_mode(mode, (*MODES, "dear"))
    plan.check(len(profile), profile.names)
    parts = _parts(plan, profile, mode)
    tensors, buffers = _selection(plan, profile, costs, mode, parts)
    # One clock through all additions, in the order of the formulas: plans that agree on when a tensor is
    # ready then agree to the bit. A merge buffer's own term comes after its last tensor.
    stops = np.repeat(np.cumsum(plan.counts), parts)
    clock = np.cumsum(np.insert(profile.backward + tensors, stops, np.repeat(buffers, parts)))
    ready = iter(clock[stops + np.arange(len(stops))].tolist())
    takes = _exchange(plan, profile, costs, parts) / (2 if mode == "dear" else 1)
    spans = []
    free = 0.0
    for count, time in zip(parts.tolist(), takes.tolist(), strict=True):
        leaves = next(ready)
        start = max(free, leaves)
        free = start + time
        for later in islice(ready, count - 1):
            free = max(free, later) + time
        spans.append(Span(leaves, start, free))
    return _forward(tuple(spans), takes, plan, profile) if mode == "dear" else Timeline(tuple(spans))


def check_mode(mode: str, known: tuple[str, ...] = MODES) -> None:
    """Raise ValueError unless `mode` is one of `known`."""
    if mode in known:
        return
    if mode == "dear":
        raise ValueError(f"mode 'dear' is supported by the planner 'dear' only. Use one of {', '.join(known)}.")
    raise ValueError(f"mode {mode!r} is unknown. Use one of {', '.join(known)}.")


def _forward(spans: tuple[Span, ...], takes: Reals, plan: Plan, profile: Profile) -> Timeline:
    """Return the timeline with the all-gathers and the forward pass that follow the reduce-scatters."""
    if profile.forward is None:
        raise ValueError(
            "mode 'dear' requires profile.forward, because it hides all-gathers behind forward. Measure it."
        )
    ready = free = clock = spans[-1].end
    gathers = []
    for (first, stop), time in zip(plan.bounds[::-1], takes[::-1].tolist(), strict=True):
        start, free = free, free + time
        gathers.append(Span(ready, start, free))
        clock = max(clock, free) + float(profile.forward[first:stop].sum())
    return Timeline(spans, tuple(gathers[::-1]), clock)


def _parts(plan: Plan, profile: Profile, mode: str) -> Elements:
    """Return the number of messages of each merge buffer, shape (m,)."""
    parts: Elements = np.ones(len(plan.counts), dtype=np.int64)
    if mode in ("ahead", "behind") and max(plan.parts) > 1:
        for i, (count, part) in enumerate(zip(plan.counts, plan.parts, strict=True)):
            if mode == "ahead" and min(count, part) > 1:
                raise ValueError(
                    f"merge buffer {i} has {part} parts, but must have 1, because each of its {count} tensors is "
                    "selected separately when sparsified ahead"
                )
        parts = np.where(_totals(profile.work, plan) > 0, plan.parts, parts)
    return parts


def _selection(plan: Plan, profile: Profile, costs: Costs, mode: str, parts: Elements) -> tuple[Reals, Reals]:
    """Return seconds of the processor: after each tensor, shape (n,), for each part of a merge buffer, shape (m,)."""
    tensors: Reals = np.zeros(len(profile))
    buffers: Reals = np.zeros(len(plan.counts))
    if mode in ("ahead", "behind"):
        sparse = ~np.asarray(plan.dense)
        early = sparse & (parts == 1) if mode == "ahead" else np.zeros_like(sparse)
        late = sparse & ~early
        if early.any():
            tensors = np.where(np.repeat(early, plan.counts), costs.sparsify(profile.work), 0.0)
        if late.any():
            buffers = np.where(late, costs.sparsify(-(-_totals(profile.work, plan) // parts)), 0.0)
    if costs.message is not None:
        load = np.where(plan.dense, 0, -(-_totals(profile.load, plan) // parts))
        buffers = buffers + costs.message(load)
    return tensors, buffers


def _exchange(plan: Plan, profile: Profile, costs: Costs, parts: Elements) -> Reals:
    """Return seconds of the exchange of each merge buffer, or of one of its parts, shape (m,)."""
    sparse = costs.exchange(-(-_totals(profile.load, plan) // parts))
    if not any(plan.dense):
        return sparse
    if costs.dense is None:
        raise ValueError(
            f"merge buffer {plan.dense.index(True)} is dense, but costs.dense is None. Pass the cost of a dense "
            "exchange."
        )
    return np.where(plan.dense, costs.dense(_totals(profile.numel, plan)), sparse)


def _totals(values: Elements, plan: Plan) -> Elements:
    """Return the sum of `values`, shape (n,), over each merge buffer, shape (m,)."""
    return np.add.reduceat(values, [start for start, _ in plan.bounds])
