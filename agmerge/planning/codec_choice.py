# SPDX-License-Identifier: Apache-2.0
"""Choice of the best plan, and of the value codec, for given measurements: pure functions, for rank 0.

Of codecs the one with the fewest seconds per delivered share of the energy is best. Quantisation errors are sent later,
so a step that delivers the share d counts for d: of all codecs the one with the least seconds / d is chosen, if that is
clearly less than with the gradient's own dtype. A codec that delivers too little is excluded: see ``LEAST``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

import merging
from agmerge.exchanges.routing import AHEAD, send_mode
from agmerge.exchanges.table import EXCHANGES
from agmerge.metrics.step_times import Seconds
from agmerge.step.agreed_state import with_mode
from agmerge.step.merge_buffers import MergeBuffers
from merging import Curve, Measurements
from merging.pieces import pieces_of
from merging.plan import Elements

# The best plan, and its prediction. ``planner`` is the one in training, ``buffers`` the merge buffers in use; neither
# is changed.


@dataclass(frozen=True, repr=False, kw_only=True)
class FixedCounts(merging.Planner):
    """Planner that keeps a partition; which merge buffers are dense, and in how many messages, is still chosen."""

    name: ClassVar[str] = "fixed"
    timed: ClassVar[bool] = False
    counts: tuple[int, ...]  # tensors per merge buffer

    def partition(self, profile: merging.Profile, costs: merging.Costs, mode: str) -> merging.Plan:
        return merging.Plan(self.counts)


def planner_of(buffers: MergeBuffers, planner: merging.Planner) -> merging.Planner:
    """Return the planner, unless the script's groups say which tensors share a message."""
    return planner if buffers.config.merging.groups is None else FixedCounts(counts=buffers.plan.counts)


def best_plan(planner: merging.Planner, buffers: MergeBuffers, measured: Measurements) -> merging.Pieces[merging.Plan]:
    """Return, in pieces, the plan with which the planner predicts steps to end first.

    Its merge buffers are divided into messages where that helps.
    """
    fitting = planner_of(buffers, planner)
    plan, mode = yield from pieces_of(merging.best, fitting, measured)
    if fitting.max_messages > 1 and EXCHANGES[buffers.exchange].pipelines_parts:
        most = fitting.max_messages
        plan = yield from pieces_of(merging.divide, plan, measured.profile, measured.costs, mode, most)
    return with_mode(plan, mode)


def mode_of(plan: merging.Plan, measured: Measurements) -> str:
    """Return the mode in which ``plan`` is to be predicted: "ahead" by its labels, else the other allowed one."""
    return AHEAD if send_mode(plan).ahead else next((mode for mode in measured.modes if mode != AHEAD), AHEAD)


def predicted_finish(plan: merging.Plan, measured: Measurements) -> float:
    """Return when the last exchange is predicted to end, in seconds since backward began."""
    return merging.predict(plan, measured.profile, measured.costs, mode_of(plan, measured)).finish


def predicted_exchange_seconds(plan: merging.Plan, measured: Measurements) -> Seconds:
    """Return the seconds that each merge buffer's exchange is predicted to take, (m,)."""
    timeline = merging.predict(plan, measured.profile, measured.costs, mode_of(plan, measured))
    return np.array([span.end - span.start for span in timeline.spans])


# The value codec.

FAR = 1 << 31  # elements: where a curve of one point has another one
GAIN = 0.01  # share of a step's seconds: a codec that rounds has to gain more
LEAST = 0.9999  # of the selected energy: a codec that delivers less is not chosen, see benchmarks/notebook/parity.md


@dataclass(frozen=True)
class Codec:
    """Costs and losses of a value codec on the values that training selects now, on all ranks."""

    name: str
    size: float  # bytes of an element in a message, with its index
    delivered: float  # share of the selected energy that receivers read
    encode: float  # seconds a value
    decode: float  # seconds a value


def best(seconds: Sequence[float], delivered: Sequence[float]) -> int:
    """Return the number of the candidate with the least seconds / delivered, the first of equals.

    Candidates that round have to gain more than ``GAIN``, as a share, over the best one that does not, if there is one.
    A candidate that delivers nothing is excluded.
    """
    scores = [took / share if share > 0 else float("inf") for took, share in zip(seconds, delivered, strict=True)]
    exact = [number for number, share in enumerate(delivered) if share == 1.0]
    first = int(np.argmin(scores))
    stays = min(exact, key=scores.__getitem__, default=first)
    return first if scores[first] * (1 + GAIN) < scores[stays] else stays


def in_codec(measured: Measurements, load: Elements, now: Codec, other: Codec, workers: int) -> Measurements:
    """Return measurements made in the codec ``now`` as they would be in ``other``.

    An exchange takes as long as one of as many bytes took, plus the difference in decoding all ranks' values. A message
    takes as much processor time as before, plus the difference in encoding.

    Args:

        measured: in ``now``.
        load: (n,), of :func:`agmerge.planning.measuring.profile` for the other codec.
        now, other: of :func:`agmerge.planning.codec_costs.measure_codecs`.
        workers: the number of ranks with values that each rank reads.
    """
    profile = merging.Profile(**{**measured.profile.plain(), "load": load})
    exchange = stretched(measured.exchange, now.size / other.size)
    return replace(
        measured,
        profile=profile,
        exchange=tilted(exchange, workers * (other.decode - now.decode)),
        message=None if measured.message is None else tilted(measured.message, other.encode - now.encode),
    )


def stretched(curve: Curve, factor: float) -> Curve:
    """Return the curve over ``factor`` times as many elements."""
    points: dict[int, float] = {}
    for elements, seconds in zip(curve.elements, curve.seconds, strict=True):
        points[round(elements * factor)] = seconds
    return Curve(tuple(points), tuple(points.values()))


def tilted(curve: Curve, slope: float) -> Curve:
    """Return the curve with ``slope`` seconds more for each element; it still does not fall, nor below 0."""
    if slope == 0.0:
        return curve
    at = curve.elements if len(curve.elements) > 1 else (*curve.elements, FAR)
    seconds = np.maximum.accumulate(np.maximum(0.0, curve(np.array(at)) + slope * np.array(at)))
    return Curve(at, tuple(seconds.tolist()))
