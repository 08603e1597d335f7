"""What selection and the exchange cost here: timed on the messages, the collective and the packing in use."""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

import numpy as np

from agmerge.backends.handshake import gather_bytes
from agmerge.exchanges import Exchange, SegmentBuffers
from agmerge.options.config import AUTO
from agmerge.planning.message_timing import MANY, MessageTimer
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.tensors.layout import Layout, Segment
from merging import Curve
from sparsifiers import Selection

SPEND = 3.0  # seconds, about, for all probes together
WORTH = 3.0  # steps' worth of time that may be spent if that is more: whole messages are timed on slow networks too
GROWTH = 2.0  # of the sizes, at least
RUNS = (2, 12)  # least and most, of one size
SHARE = 6  # so many sizes share that time

PIECE = 1e-5  # seconds: no processor does a piece of work sooner
ROUNDS = (2, 7)  # so often are small messages in a row timed, least and most
BETWEEN = (1e-3, 0.05)  # seconds of work from one of them to the next, least and most

Samples = dict[int, list[float]]


class MeasuredCosts(NamedTuple):
    """Curves: of selection (None where nothing is selected), the exchange, a dense one where that is a choice, and
    what a message takes of the processor, by elements sent (None: nothing that is known)."""

    sparsify: Curve | None
    exchange: Curve
    dense: Curve | None
    message: Curve | None = None


def probe(session: MergeBuffers, step: int, backward: float, finish: float = 0.0) -> MeasuredCosts:
    """Collective. What selection and exchanges cost. Collective, between steps.

    ``backward``: its seconds on this rank. ``finish``: seconds of a step's exchange, the same on all ranks.
    Runs of tensors of the largest lane, of sizes that double, are selected from and exchanged as in a step;
    nothing of it is written to a residual or an update. Selection and packing are means of several calls with one
    key, since thresholds may be reused; an exchange is the median from the moment its message is packed. All are the
    maximum over ranks. When sizes become too dear, the rest follows the slope. What small messages take of the
    processor beside that, its share of the network's threads for one, is part of ``message``.
    """
    config, spend = session.config, max(SPEND, WORTH * finish)
    sparse, dense = session.exchanges()
    segments = sizes(session.layout)
    choice: Curve | None = None
    if segments[0].lane.sparse and config.sparsifier is not None:
        selections, packs, travels = _measured(session, segments, sparse, step, backward, spend)
        beside = _beside(MessageTimer(session, segments[0], sparse, step, backward), selections, packs, travels)
        message = Curve.fit({load: [one + beside for one in runs] for load, runs in packs.items()})
        apart = _apart(session, segments[-1], sparse, step)
        if config.exchange == AUTO:  # the last one: it leaves nothing to select from
            choice = Curve.fit(_measured(session, segments, dense, step, backward, spend)[2])
        config.sparsifier.retain(session.keys())
        sparsify = Curve.fit({size: [one + apart for one in runs] for size, runs in selections.items()}, zero=True)
        return MeasuredCosts(sparsify, Curve.fit(travels), choice, message)
    selections, packs, travels = _measured(session, segments, dense, step, backward, spend)
    beside = _beside(MessageTimer(session, segments[0], dense, step, backward), selections, packs, travels)
    return MeasuredCosts(None, Curve.fit(travels), None, Curve((0,), (beside,)))


def _measured(
    session: MergeBuffers, segments: list[Segment], exchange: Exchange, step: int, backward: float, spend: float
) -> tuple[Samples, Samples, Samples]:
    """Seconds of selection by elements, of packing and of the exchange by load, as far as there is time for them."""
    selections: Samples = {}
    packs: Samples = {}
    travels: Samples = {}
    # One message to begin with: on a slow network the first size would take all the time there is.
    first = MessageTimer(session, segments[0], exchange, step, backward)
    cost, before = 2 * _agreed(session, first.exchange(1))[0], segments[0].numel
    spent = cost
    for segment in segments:
        # Every rank has the same figures, so all of them stop at the same size.
        expected = cost * segment.numel / before
        if spent + RUNS[0] * expected > spend and travels:
            break
        runs = int(min(max(spend / SHARE / expected, RUNS[0]), RUNS[1])) if expected else RUNS[1]
        trial = MessageTimer(session, segment, exchange, step, backward)
        select, pack, travel = _agreed(session, *trial.select(runs), trial.exchange(runs))
        load = trial.capacity if exchange.sparse else segment.numel
        travels.setdefault(load, []).append(travel)
        packs.setdefault(load, []).append(pack)
        selections.setdefault(segment.numel, []).append(select)
        cost, before = select + pack + 2 * travel, segment.numel  # selecting, a message is sent as well
        spent += runs * cost
    return selections, packs, travels


def _beside(trial: MessageTimer, selections: Samples, packs: Samples, travels: Samples) -> float:
    """Seconds that a small message takes of the processor beside selection and packing, the maximum over ranks:
    how much longer the same work takes when messages leave in between and arrive.

    The work hides their way through the network; where that is long, nothing else about a message matters.
    """
    between = max(BETWEEN[0], 1.5 * min(travels[min(travels)]))
    if not trial.on_host or between > BETWEEN[1]:  # a device computes while the host waits and packs
        return 0.0
    pieces = math.ceil(between / max(trial.work(10) / 10, PIECE))
    rounds = int(min(max(SPEND / 2 / (2 * MANY * between), ROUNDS[0]), ROUNDS[1]))
    both = [(trial.burst(MANY, pieces), trial.burst(0, pieces)) for _ in range(rounds)]
    longer, shorter = (min(times) for times in zip(*both, strict=True))  # least: what else runs here is no message
    extra = (longer - shorter) / MANY
    known = min(selections[min(selections)]) + min(packs[min(packs)])
    return max(0.0, _agreed(trial.session, extra)[0] - known)


def _apart(session: MergeBuffers, segment: Segment, exchange: Exchange, step: int) -> float:
    """Seconds to pack what was selected from one more vector into the same message, the maximum over ranks."""
    slots = segment.slots[: MANY // 2]
    several = [Segment(segment.lane, (slot,)) for slot in slots]
    packs = []
    for segments in ([Segment(segment.lane, slots)], several):
        trials = [MessageTimer(session, one, exchange, step, 0.0) for one in segments]
        loads, offers = [one.load for one in trials], [one.offer for one in trials]
        packs.append([_packed(trials[0], loads, offers, len(slots)) for _ in range(RUNS[1])])
    more = statistics.median(packs[1]) - statistics.median(packs[0])
    return max(0.0, _agreed(session, more)[0]) / max(1, len(slots) - 1)


def _packed(trial: MessageTimer, loads: list[SegmentBuffers], offers: list[Selection | None], tensors: int) -> float:
    """Seconds to pack and start one message of several loads."""
    begin = trial.now()
    pending = trial.start("probe of several", loads, offers, tensors)
    took = trial.now() - begin
    trial.wait(pending)
    return took


def sizes(layout: Layout) -> list[Segment]:
    """Runs of tensors of the largest lane, sparse if there is one: from its smallest tensor to all of them."""
    lane = max(layout.lengths, key=lambda lane: (lane.sparse, layout.lengths[lane]))
    slots = [slot for slot in layout.slots if slot.lane == lane]
    runs = [Segment(lane, (slot,)) for slot in slots] + [Segment(lane, tuple(slots[:i])) for i in range(2, len(slots))]
    whole = Segment(lane, tuple(slots))
    chosen: list[Segment] = []
    for run in sorted(runs, key=lambda run: run.numel):
        if run.numel <= whole.numel / GROWTH**0.5 and (not chosen or GROWTH * chosen[-1].numel <= run.numel):
            chosen.append(run)
    return [*chosen, whole]


def _agreed(session: MergeBuffers, *seconds: float) -> list[float]:
    """The maximum over ranks of each."""
    mine = np.array(seconds, dtype=np.float64).tobytes()
    rows = gather_bytes(session.comm, mine, "probe/seconds", session.config.timeout)
    return [max(column) for column in zip(*(np.frombuffer(row).tolist() for row in rows), strict=True)]
