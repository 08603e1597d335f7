"""Measure what selection and the exchange cost here, on the messages, the collective and the packing in use."""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

import numpy as np

from agmerge.backends.handshake import gather_bytes
from agmerge.exchanges import Exchange
from agmerge.options.config import AUTO
from agmerge.planning.message_timing import BURST, MessageTimer, unobserved
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.tensors.layout import Lane, Layout, Segment
from merging import Curve
from sparsifiers import Kind

SPEND = 3.0  # seconds, about, for all probes together
WORTH = 3.0  # steps' worth of time that may be spent if that is more: whole messages are timed on slow networks too
GROWTH = 2.0  # of the sizes, at least
RUNS = (2, 12)  # least and most, of one size
SHARE = 6  # so many sizes share that time

PIECE = 1e-5  # seconds: no processor does a piece of work sooner
ROUNDS = (2, 7)  # so often are small messages in a row timed, least and most
BETWEEN = (1e-3, 0.05)  # seconds of work from one of them to the next, least and most

Samples = dict[int, list[float]]  # seconds by elements, the maximum over ranks


class MeasuredCosts(NamedTuple):
    """Hold the curves that plans are made from: seconds over elements, the same on every rank."""

    sparsify: Curve | None  # of selection, over elements that are selected from; None: nothing is compressed
    exchange: Curve  # over elements of a message
    dense: Curve | None  # of a dense exchange, over elements; None: no merge buffer has the choice
    message: Curve | None = None  # what a message takes of the processor, over its elements; None: not known


class SampledTimes(NamedTuple):
    """Hold the seconds of one exchange's messages, of all sizes that there was time for."""

    selection: Samples  # by elements that were selected from
    packing: Samples  # by elements of the message
    exchange: Samples  # by elements of the message


def probe(buffers: MergeBuffers, step: int, backward: float, finish: float = 0.0) -> MeasuredCosts:
    """Collective. Measure what selection and exchanges cost, between steps.

    Runs of tensors of one lane, see :func:`measured_lane`, of sizes that double, are selected from, or projected, and
    exchanged as in a step; nothing of it is written to a residual or an update. Selection, which projecting counts as,
    and packing are means of several calls with one key, since thresholds may be reused; an exchange is the median from
    the moment its message is packed. All are the
    maximum over ranks. When sizes become too dear, the rest follows the slope. What small messages take of the
    processor beside that, its share of the network's threads for one, is part of ``message``.

    Args:
        buffers: whose messages are timed.
        step: the one to come, whose density counts.
        backward: seconds of a backward pass on this rank.
        finish: seconds of a step's exchange, the same on all ranks.
    """
    config, spend = buffers.config, max(SPEND, WORTH * finish)
    exchanges = buffers.exchanges()
    segments = sizes(buffers.layout)
    lane, dense = segments[0].lane, exchanges[Kind.DENSE]
    compressed = exchanges[lane.kind]
    if lane.kind is Kind.DENSE:
        times = _sample(buffers, segments, dense, step, backward, spend)
        overhead = _cpu_overhead_of_message(MessageTimer(buffers, segments[0], dense, step, backward), times)
        return MeasuredCosts(None, Curve.fit(times.exchange), None, Curve((0,), (overhead,)))
    times = _sample(buffers, segments, compressed, step, backward, spend)
    overhead = _cpu_overhead_of_message(MessageTimer(buffers, segments[0], compressed, step, backward), times)
    per_vector = _overhead_per_extra_vector(buffers, segments[-1], compressed, step) if lane.sparse else 0.0
    choice: Curve | None = None
    if config.exchange == AUTO:  # the last one: it leaves nothing to select from
        choice = Curve.fit(_sample(buffers, segments, dense, step, backward, spend).exchange)
    for part in map(config.compressor.part, config.compressor.kinds):
        unobserved(part).retain(buffers.keys())
    return MeasuredCosts(
        Curve.fit(_plus(per_vector, times.selection), zero=True),
        Curve.fit(times.exchange),
        choice,
        Curve.fit(_plus(overhead, times.packing)),
    )


def measured_lane(layout: Layout) -> Lane:
    """Return the lane whose messages are timed: the largest that is compressed, if one is, else the largest."""
    return max(layout.lengths, key=lambda lane: (lane.kind is not Kind.DENSE, layout.lengths[lane]))


def sizes(layout: Layout) -> list[Segment]:
    """Return runs of tensors of the measured lane: from its smallest tensor to all of them.

    Each is at least ``GROWTH`` times as large as the one before, but for the last one, which is the whole lane.
    """
    lane = measured_lane(layout)
    slots = [slot for slot in layout.slots if slot.lane == lane]
    runs = [Segment(lane, (slot,)) for slot in slots] + [Segment(lane, tuple(slots[:i])) for i in range(2, len(slots))]
    whole = Segment(lane, tuple(slots))
    chosen: list[Segment] = []
    for run in sorted(runs, key=lambda run: run.numel):
        if run.numel <= whole.numel / GROWTH**0.5 and (not chosen or GROWTH * chosen[-1].numel <= run.numel):
            chosen.append(run)
    return [*chosen, whole]


def _sample(
    buffers: MergeBuffers, segments: list[Segment], exchange: Exchange, step: int, backward: float, spend: float
) -> SampledTimes:
    """Collective. Time the segments, smallest first, until about ``spend`` seconds are spent: one of them at least."""
    times = SampledTimes({}, {}, {})
    # One message to begin with: on a slow network the first size would take all the time there is.
    first = MessageTimer(buffers, segments[0], exchange, step, backward)
    (seconds,) = _max_over_ranks(buffers, first.time_exchange(1))
    cost, sized = 2 * seconds, segments[0].numel  # of one run of the last size
    spent = cost
    for segment in segments:
        # Every rank has the same figures, so all of them stop at the same size.
        expected = cost * segment.numel / sized
        if spent + RUNS[0] * expected > spend and times.exchange:
            break
        runs = int(min(max(spend / SHARE / expected, RUNS[0]), RUNS[1])) if expected else RUNS[1]
        timer = MessageTimer(buffers, segment, exchange, step, backward)
        selecting, packing, travel = _max_over_ranks(buffers, *timer.time_selection(runs), timer.time_exchange(runs))
        if timer.factorises:  # what takes the processor is not packing, but the passes over the matrices
            selecting, packing = selecting + packing, 0.0
        elements = timer.capacity
        times.exchange.setdefault(elements, []).append(travel)
        times.packing.setdefault(elements, []).append(packing)
        times.selection.setdefault(segment.numel, []).append(selecting)
        cost, sized = selecting + packing + 2 * travel, segment.numel  # selecting, a message is sent as well
        spent += runs * cost
    return times


def _cpu_overhead_of_message(timer: MessageTimer, times: SampledTimes) -> float:
    """Collective. Return the seconds that a small message takes of the processor beside selection and packing.

    That is how much longer the same work takes when messages leave in between and arrive, the maximum over ranks. The
    work hides their way through the network; where that is long, nothing else about a message matters, and it is 0.
    """
    between = max(BETWEEN[0], 1.5 * _fastest(times.exchange))
    if not timer.on_host or between > BETWEEN[1]:  # a device computes while the host waits and packs
        return 0.0
    pieces = math.ceil(between / max(timer.time_work(10) / 10, PIECE))
    rounds = int(min(max(SPEND / 2 / (2 * BURST * between), ROUNDS[0]), ROUNDS[1]))
    # In turn, so that a load that comes or goes meets both; and the minimum, for other load only adds.
    bursts = [(timer.time_burst(BURST, pieces), timer.time_burst(0, pieces)) for _ in range(rounds)]
    with_messages, without = (min(seconds) for seconds in zip(*bursts, strict=True))
    (per_message,) = _max_over_ranks(timer.buffers, (with_messages - without) / BURST)
    return max(0.0, per_message - (_fastest(times.selection) + _fastest(times.packing)))


def _overhead_per_extra_vector(buffers: MergeBuffers, segment: Segment, exchange: Exchange, step: int) -> float:
    """Collective. Return the seconds to pack what was selected from one more vector into the same message.

    The maximum over ranks: a message of several vectors is compared with one of as many elements from one vector.
    """
    slots = segment.slots[: BURST // 2]
    vectors = [Segment(segment.lane, (slot,)) for slot in slots]
    medians = []
    for segments in ([Segment(segment.lane, slots)], vectors):
        timers = [MessageTimer(buffers, each, exchange, step, 0.0) for each in segments]
        medians.append(statistics.median(_seconds_to_pack(timers, len(slots)) for _ in range(RUNS[1])))
    (more,) = _max_over_ranks(buffers, medians[1] - medians[0])
    return max(0.0, more) / max(1, len(slots) - 1)


def _seconds_to_pack(timers: list[MessageTimer], tensors: int) -> float:
    """Collective. Return the seconds to pack and start one message of all timers' segments, ``tensors`` in all."""
    buffers, selections = [timer.segment_buffers for timer in timers], [timer.selection for timer in timers]
    begin = timers[0].now()
    in_flight = timers[0].start("probe of several", buffers, selections, tensors)
    seconds = timers[0].now() - begin
    timers[0].wait(in_flight)
    return seconds


def _fastest(samples: Samples) -> float:
    """Return the least seconds of the smallest size."""
    return min(samples[min(samples)])


def _plus(seconds: float, samples: Samples) -> Samples:
    """Return the samples with so many seconds added to each."""
    return {size: [measured + seconds for measured in runs] for size, runs in samples.items()}


def _max_over_ranks(buffers: MergeBuffers, *seconds: float) -> list[float]:
    """Collective. Return the maximum over ranks of each."""
    own = np.array(seconds, dtype=np.float64).tobytes()
    rows = gather_bytes(buffers.comm, own, "probe/seconds", buffers.config.timeout)
    return [max(column) for column in zip(*(np.frombuffer(row).tolist() for row in rows), strict=True)]
