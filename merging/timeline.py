# SPDX-License-Identifier: Apache-2.0
"""Predicted times at which each merge buffer is ready, starts and ends: the quantity that every planner minimises.

For a given partition, which merge buffers go dense and in how many messages follows from these times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from merging.costs import Costs, Profile
from merging.pieces import Pieces, in_pieces
from merging.plan import Elements, Plan, Reals, whole

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


# Dense or sparse, merge buffer by merge buffer.

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


# The number of messages of each merge buffer.

MOST = 8
SMALLEST = 2**18  # elements of work: selected from in 0.1 to 0.3 ms (measured), about the start-up of a message
GAIN = 0.03  # of the finish: least gain of a division, since predictions are not more exact


@in_pieces
def divide(plan: Plan, profile: Profile, costs: Costs, mode: str, most: int = MOST) -> Pieces[Plan]:
    """Divide merge buffers into parts if the step is predicted to end sooner.

    While one part is sent, the next is selected and encoded. Every part costs a start-up. From the last merge buffer to
    the first, 2, 4, ... parts of at least ``SMALLEST`` values are tried. A division is kept if it shortens the step by
    more than ``GAIN``. Uncompressed merge buffers, those without selection, and those of several tensors with
    ``"ahead"`` are never divided. The idea is that of CaSync (HiPress, SOSP 2021) and Espresso (EuroSys 2023).

    Args:
        plan (Plan): The merge buffers. Its own parts are dropped.
        profile (Profile): Sizes and times of the tensors.
        costs (Costs): Costs of selection and messages.
        mode (str): ``"dense"``, ``"ahead"`` or ``"behind"``.
        most (int): Largest number of parts. Default: 8.

    Raises:
        ValueError: For an unknown mode, a plan that does not fit the profile, or ``most`` below 1.
    """
    check_mode(mode)
    most = whole("divide: most", most, least=1)
    plan = replace(plan, parts=())
    finish = predict(plan, profile, costs, mode).finish
    if mode == "dense":
        return plan
    for buffer in reversed(range(len(plan.counts))):
        start, stop = plan.bounds[buffer]
        if plan.dense[buffer] or (mode == "ahead" and stop - start > 1):
            continue
        largest = min(most, int(profile.work[start:stop].sum()) // SMALLEST)
        ends = [(finish * (1 - GAIN), plan)]
        for power in range(1, largest.bit_length()):
            yield
            parts = (*plan.parts[:buffer], 2**power, *plan.parts[buffer + 1 :])
            divided = replace(plan, parts=parts)
            ends.append((predict(divided, profile, costs, mode).finish, divided))
        end, better = min(ends, key=lambda pair: pair[0])
        if better is not plan:
            finish, plan = end, better
    return plan


# The size limit of merge buffers: indices in a message are int32.

LIMIT = 2**31


def check_tensors(profile: Profile) -> None:
    """Raise ValueError, with its name, for a tensor that is too large for a merge buffer."""
    index = int(profile.numel.argmax())
    if profile.numel[index] >= LIMIT:
        raise ValueError(
            f"tensor {index} ({profile.names[index]!r}) has {profile.numel[index]} elements, but a merge buffer must "
            "have fewer than 2**31. Split the parameter."
        )


def cut(plan: Plan, profile: Profile) -> Plan:
    """Return `plan` with every merge buffer of 2**31 elements or more cut into runs that stay below.

    The pieces keep the dense flag, the label and the parts. `check_tensors` must have passed.
    """
    numel = profile.numel.tolist()
    pieces = [cut_counts(numel[start:stop], LIMIT) for start, stop in plan.bounds]
    return Plan(
        counts=tuple(count for piece in pieces for count in piece),
        dense=tuple(flag for piece, flag in zip(pieces, plan.dense, strict=True) for _ in piece),
        labels=tuple(label for piece, label in zip(pieces, plan.labels, strict=True) for _ in piece),
        names=plan.names,
        parts=tuple(parts for piece, parts in zip(pieces, plan.parts, strict=True) for _ in piece),
    )


def cut_counts(numel: Sequence[int], limit: int) -> tuple[int, ...]:
    """Return tensors per run when a run is closed before it would reach `limit` elements.

    A tensor that reaches `limit` by itself is a run of its own.
    """
    counts = [0]
    size = 0
    for elements in numel:
        if counts[-1] and size + elements >= limit:
            counts.append(0)
            size = 0
        counts[-1] += 1
        size += elements
    return tuple(counts)
