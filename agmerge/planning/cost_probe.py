# SPDX-License-Identifier: Apache-2.0
"""Probes of what selection and the exchange cost here, on the messages, the collective and the packing in use.

They are spread over steps, within a :class:`Budget`: no step shall be much longer for them. Functions that return a
generator yield where they have to wait for the end of the next step.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple, TypeVar, cast

import numpy as np
import torch

from agmerge.backends.handshake import gather_bytes
from agmerge.exchanges import Exchange, InFlight, SegmentBuffers
from agmerge.exchanges.message.format import RoundHeader
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.tensors.layout import Layout, Segment, TensorClass
from merging import Curve
from sparsifiers import Kind, Selection, Sparsifier

# One message, timed.

PIECE_OF_WORK = torch.ones(128, 128)  # its product with itself takes about a tenth of a millisecond
BURST = 4  # small messages in a row


class MessageTimer:
    """Timer of one message, sent again and again: one segment, selected from and exchanged as in a step.

    All times are this rank's own. No residual or update that is still needed is written to. Used between two steps and
    not after the next one, in which memory changes places.
    """

    def __init__(self, buffers: MergeBuffers, segment: Segment, exchange: Exchange, step: int, backward: float) -> None:
        """Select once, so that the length of the message is known.

        Args:

            buffers: the merge buffers in use, with their memory and sparsifier.
            segment: the elements of the message.
            exchange: how it is sent: selected from if that is a sparse one, else dense.
            step: its density and number count.
            backward: seconds of a backward pass on this rank; half of it goes on after a message has left.
        """
        self.buffers, self.segment, self.step, self._exchange = buffers, segment, step, exchange
        self.began = self.now()
        self.sent = 0  # bytes handed to collectives
        self._busy = backward / 2  # seconds, about, that backward goes on after a message has left
        self.prepares = exchange.prepares is not None  # factors are made of segments, or few bits, tensor by tensor
        self.segment_buffers = buffers.flat.operands(segment)
        if not exchange.sparse:
            quantises = exchange.prepares is Kind.QUANTISED
            self.segment_buffers = _in_use(self.segment_buffers) if quantises else _zeros(self.segment_buffers)
        self.on_host = segment.tensor_class.device.type == "cpu"
        self._shares_cores = self.on_host and exchange.can_poll  # backward and the network's threads
        self.selection = self._select()  # the last one; None: the segment is sent dense
        self.factorises = exchange.factorises  # segments are matrices, and factors of these are sent
        self.capacity = self._elements()  # of a message

    def start(
        self, name: str, segment_buffers: list[SegmentBuffers], selections: list[Selection | None], tensors: int
    ) -> InFlight:
        """Collective. Send a message of these segments, ``tensors`` in all, and return it under way."""
        header = RoundHeader(self.step, self.buffers.fingerprint, 0, 0, (False,) * tensors)
        return self._exchange.start(name, segment_buffers, selections, header)

    def wait(self, in_flight: InFlight) -> None:
        """Collective. Receive a message and write nothing."""
        self._exchange.wait(in_flight)
        self.sent += in_flight.bytes

    def time_selection(self, runs: int) -> tuple[float, float]:
        """Collective. Return the seconds to select, and those to pack and start: means of ``runs`` messages."""
        selecting = packing = 0.0
        for _ in range(runs):
            begin = self.now()
            self.selection = self._select()
            selected = self.now()
            wait = self._send()
            selecting, packing = selecting + selected - begin, packing + self.now() - selected
            wait()
        return selecting / runs, packing / runs

    def time_exchange(self, runs: int) -> float:
        """Collective. Return the seconds from the packed message to its arrival, the median of ``runs`` messages.

        For dense segments packing counts, too.
        """
        seconds = []
        for _ in range(runs):
            begin = self.now()
            wait = self._send()
            begin = self.now() if self.selection is not None or self.prepares else begin
            wait()
            seconds.append(self.now() - begin)
        return statistics.median(seconds)

    def time_work(self, pieces: int) -> float:
        """Return the seconds of so many pieces of work, with no message under way."""
        begin = self.now()
        for _ in range(pieces):
            torch.mm(PIECE_OF_WORK, PIECE_OF_WORK)
        return self.now() - begin

    def time_burst(self, messages: int, pieces: int) -> float:
        """Collective. Return the seconds of ``BURST`` times so many pieces of work, with messages sent in between.

        The first ``messages`` of the turns send one each, and at the end all are received.
        """
        scratch = SegmentBuffers(self.segment, self.segment_buffers.work, torch.empty_like(self.segment_buffers.update))
        started = []
        begin = self.now()
        for number in range(BURST):
            if number < messages:
                self.selection = self._select()
                started.append(self.start(f"probe {number}", [scratch], [self.selection], len(self.segment.slots)))
            self.time_work(pieces)
        for in_flight in started:
            self.wait(in_flight)
            self._exchange.finish(in_flight)
        return self.now() - begin

    def now(self) -> float:
        """Return a time in seconds, when the device has finished all queued work."""
        device = self.segment.tensor_class.device
        if device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(device)  # between steps: nothing else runs
        return time.perf_counter()

    def _elements(self) -> int:
        """Return the elements of a message."""
        if self.factorises and self.buffers.flat.bases is not None:
            return sum(map(self.buffers.flat.bases.elements, self.segment.slots))
        return self.segment.numel if self.selection is None else self.selection.indices.numel()

    def _select(self) -> Selection | None:
        """Select from the segment under a key of its own; return None where it is sent dense."""
        if not self._exchange.sparse or not self.segment.tensor_class.sparse:
            return None
        part = self.buffers.config.compression.compressor.part(Kind.SPARSE)
        assert part is not None  # the tensor class is a sparse one
        sparsifier = cast(Sparsifier, part.unobserved)  # figures are of training, and not of probes
        work, k, shapes = self.buffers.vector(self.buffers.flat.operands(self.segment), self.step)
        return sparsifier.select(work, k=k, key=f"probe of {self.segment.numel}", step=self.step, shapes=shapes)

    def _send(self) -> Callable[[], object]:
        """Collective. Send the message; return the function that waits for it."""
        in_flight = self.start("probe", [self.segment_buffers], [self.selection], len(self.segment.slots))

        def wait() -> None:
            # During backward the network's threads must share the cores: a message takes longer than on an idle host.
            start = time.monotonic()
            while self._shares_cores and time.monotonic() - start < self._busy:
                if self._exchange.arrived(in_flight):
                    break
                torch.mm(PIECE_OF_WORK, PIECE_OF_WORK)
            self.wait(in_flight)

        return wait


def _zeros(segment_buffers: SegmentBuffers) -> SegmentBuffers:
    """Return buffers that may be summed where they lie, again and again.

    Between steps ``work`` is free to be overwritten, unless the last update is in it.
    """
    shared = segment_buffers.work.data_ptr() == segment_buffers.update.data_ptr()
    work = torch.zeros_like(segment_buffers.work) if shared else segment_buffers.work.zero_()
    return SegmentBuffers(segment_buffers.segment, work, segment_buffers.update)


def _in_use(segment_buffers: SegmentBuffers) -> SegmentBuffers:
    """Return separate buffers, with numbers in them: zeros might be quantised faster."""
    work = torch.linspace(-1.0, 1.0, segment_buffers.segment.length, device=segment_buffers.work.device)
    update = torch.empty_like(segment_buffers.update)
    return SegmentBuffers(segment_buffers.segment, work.to(segment_buffers.work.dtype), update)


# Limits of probes and planning: how much longer a step takes; of probes also their time and bytes in all.

SECONDS = 1.0  # for all probes together,
STEPS = 3.0  # or so many steps' worth of time, whichever is more
SHARE = 0.05  # of a step: limit of the time for probes, or for a part of planning, after it
LEAST = 1e-3  # seconds that are allowed after any step: in less nothing can be timed
GRADIENTS = 8.0  # times the bytes of all gradients, for all probes together: docs/dev/planning.md says why
FLOOR = 1 << 16  # bytes that any model may spend: below, its messages are headers and little else


def share_of(step: float) -> float:
    """Return the seconds by which a step that takes ``step`` seconds may be longer."""
    return max(LEAST, SHARE * step)


class Budget:
    """Account of probes.

    Figures are the maximum over ranks, so that every rank counts, and stops, at the same point.
    """

    def __init__(self, step: float, gradient: int, *, at_once: bool = False) -> None:
        """Set the limits where a step takes ``step`` seconds and all gradients ``gradient`` bytes.

        ``at_once``: all probes follow one step, however long they take.
        """
        self.share = math.inf if at_once else share_of(step)  # seconds, after one step
        self._seconds = max(SECONDS, STEPS * step)
        self._bytes = max(FLOOR, GRADIENTS * gradient)
        self.seconds, self.bytes = 0.0, 0.0  # spent so far
        self._here = 0.0  # seconds spent after the step that has just ended

    @property
    def is_spread(self) -> bool:
        """Return whether probes are spread over steps."""
        return self.share < math.inf

    def spend(self, seconds: float, sent: float) -> None:
        """Count a probe that took so many seconds and handed so many bytes to collectives."""
        self.seconds, self.bytes, self._here = self.seconds + seconds, self.bytes + sent, self._here + seconds

    def next_step(self) -> None:
        """Begin the account of the next step."""
        self._here = 0.0

    def fits(self, seconds: float) -> bool:
        """Return whether a probe of so many seconds may follow the step that has just ended. The first one may."""
        return self._here == 0.0 or self._here + seconds <= self.share

    def runs(self, seconds: float, sent: float, most: int, part: float = 1.0) -> int:
        """Return how many runs of so many seconds and bytes each fit after this step, at least 1, at most ``most``.

        ``part``: share of the whole budget that may be used.
        """
        room = min(self.share - self._here, part * self._seconds - self.seconds)
        bytes_left = part * self._bytes - self.bytes
        fitting = [left / each for left, each in ((room, seconds), (bytes_left, sent)) if each > 0]
        return max(1, int(min([most, *fitting])))

    def allows(self, seconds: float, sent: float, part: float = 1.0) -> bool:
        """Return whether so many more seconds and bytes fit into ``part``, a share of the whole budget."""
        return self.seconds + seconds <= part * self._seconds and self.bytes + sent <= part * self._bytes


# The probes.

GROWTH = 2.0  # of the sizes, at least
RUNS = 6  # of one size in one visit, at most
SIZES = 0.8  # of the budget: the remainder is for later probes
VISITS = 2  # to each size, after different steps where a step has room for one of them only
SLOPED = 2.0  # times the seconds of the smallest size: beyond, costs grow with elements; seen messages bound the slope
ENOUGH = 1 << 20  # elements of a quantised message, which need memory of their own; training shows larger ones
PIECE = 1e-5  # seconds: no processor does a piece of work sooner
ROUNDS = 5  # so often are small messages in a row timed, at most
BETWEEN = (1e-3, 0.05)  # seconds of work from one of them to the next, least and most
VECTORS = 8  # selected from for one message, at most, to time one more
PAIRS = 2  # of messages from one vector and from several


class Run(NamedTuple):
    """Cost of one run of one size, on the slowest rank and that which sends most."""

    elements: int  # selected from, or sent dense
    seconds: float
    sent: float  # bytes


UNKNOWN = Run(0, math.inf, 0.0)
Samples = dict[int, list[float]]  # seconds by elements, the maximum over ranks
T = TypeVar("T")
Spread = Generator[None, None, T]


class MeasuredCosts(NamedTuple):
    """Curves for planning: seconds over elements, the same on every rank."""

    sparsify: Curve | None  # of selection, over elements that are selected from; None: nothing is compressed
    exchange: Curve  # over elements of a message
    dense: Curve | None  # of a dense exchange, over elements; None: no merge buffer has the choice
    message: Curve | None = None  # processor time of a message, over its elements; None: not known


class SampledTimes(NamedTuple):
    """Times of one exchange's messages, in seconds, of all sizes within the budget."""

    selection: Samples  # by elements that were selected from
    packing: Samples  # by elements of the message
    exchange: Samples  # by elements of the message


def probe(
    buffers: MergeBuffers, step: int, backward: float, budget: Budget, *, bounded: bool = False
) -> Iterator[MeasuredCosts | None]:
    """Collective. Measure what selection and exchanges cost, between steps: a part at each ``next``, the costs last.

    Each None that is yielded before them asks for another step in between. Runs of tensors of one tensor class, see
    :func:`measured_lane`, of sizes that double, are selected from, or projected, and exchanged as in a step. No
    residual, update or sparsifier state keeps anything of it. Selection (or projection) and packing are means of
    several calls with one key, since thresholds may be reused. An exchange is the median from the moment its message is
    packed. All are the maximum over ranks, and of two visits to a size the faster one counts. Sizes that are too costly
    follow the slope of smaller ones. The other processor time of small messages, as that of the network's threads, is
    part of ``message``.

    Args:

        buffers: the merge buffers in use, with the messages to be timed.
        step: the one to come; its density counts.
        backward: seconds of a backward pass on this rank.
        budget: the limit, the same on all ranks.
        bounded: training's own messages bound the cost of large ones: none is probed that makes a step too long. Of
            dense ones, which are much larger, sizes still go on until one shows that costs grow with elements.
    """
    costs = yield from _Prober(buffers, step, backward, budget, bounded).costs()
    yield costs


def measured_class(layout: Layout) -> TensorClass:
    """Return the tensor class to be timed: the largest that is compressed, if there is one, else the largest."""
    return max(
        layout.lengths, key=lambda tensor_class: (tensor_class.kind is not Kind.DENSE, layout.lengths[tensor_class])
    )


def sizes(layout: Layout) -> list[Segment]:
    """Return runs of tensors of the measured tensor class: from its smallest tensor to all of them.

    Each is at least ``GROWTH`` times as large as the one before, except the last one, which is the whole class. Of
    quantised tensors only the first run may have more than ``ENOUGH`` elements.
    """
    tensor_class = measured_class(layout)
    slots = [slot for slot in layout.slots if slot.tensor_class == tensor_class]
    runs = [Segment(tensor_class, (slot,)) for slot in slots] + [
        Segment(tensor_class, tuple(slots[:i])) for i in range(2, len(slots))
    ]
    whole = Segment(tensor_class, tuple(slots))
    chosen: list[Segment] = []
    for run in sorted(runs, key=lambda run: run.numel):
        if run.numel <= whole.numel / GROWTH**0.5 and (not chosen or GROWTH * chosen[-1].numel <= run.numel):
            chosen.append(run)
    chosen.append(whole)
    if tensor_class.kind is Kind.QUANTISED:
        return [run for run in chosen if run.numel <= ENOUGH] or chosen[:1]
    return chosen


class _Prober:
    """Timing of messages of one agreement, with an account of its costs."""

    def __init__(self, buffers: MergeBuffers, step: int, backward: float, budget: Budget, bounded: bool) -> None:
        self.buffers, self.step, self.backward, self.budget, self.bounded = buffers, step, backward, budget, bounded
        self.segments = sizes(buffers.layout)

    def costs(self) -> Spread[MeasuredCosts]:
        """Collective. Return all curves."""
        exchanges = self.buffers.probed_exchanges()
        tensor_class, dense = self.segments[0].tensor_class, exchanges[Kind.DENSE]
        if tensor_class.kind is Kind.DENSE:
            times = yield from self._sample(dense, SIZES)
            overhead = yield from self._cpu_overhead_of_message(dense, times)
            return MeasuredCosts(None, Curve.fit(_least(times.exchange)), None, Curve((0,), (overhead,)))
        compressed, has_choice = exchanges[tensor_class.kind], self.buffers.config.chooses_dense
        times = yield from self._sample(compressed, SIZES / 2 if has_choice else SIZES)
        overhead = yield from self._cpu_overhead_of_message(compressed, times)
        per_vector = 0.0
        if tensor_class.sparse:
            per_vector = yield from self._overhead_per_extra_vector(compressed)
        choice: Curve | None = None
        if has_choice:
            times_whole = yield from self._sample(dense, SIZES, packs=False)
            choice = Curve.fit(_least(times_whole.exchange))
        return MeasuredCosts(
            Curve.fit(_plus(per_vector, _least(times.selection)), zero=True),
            Curve.fit(_least(times.exchange)),
            choice,
            Curve.fit(_plus(overhead, _least(times.packing))),
        )

    # -- one probe and its costs ---------------------------------------------------------------------------------

    def _timer(self, segment: Segment, exchange: Exchange) -> MessageTimer:
        """Return a timer for use after this step alone."""
        return MessageTimer(self.buffers, segment, exchange, self.step, self.backward)

    def _room(self, seconds: float) -> Spread[None]:
        """Wait for the next step where a probe of so many seconds would make the last one too long."""
        if not self.budget.fits(seconds):
            yield
            self.budget.next_step()

    def _told(self, timers: list[MessageTimer], *seconds: float) -> list[float]:
        """Collective. Count an ended probe with these timers, and drop the state that it has left in sparsifiers.

        Returns the maximum over ranks of each of ``seconds``, then of the probe's seconds and sent bytes.
        """
        took, sent = timers[0].now() - timers[0].began, sum(timer.sent for timer in timers)
        compressor = self.buffers.config.compression.compressor
        for part in map(compressor.part, compressor.kinds):
            assert part is not None  # of each of its kinds it has one
            part.unobserved.retain(self.buffers.keys())
        told = self._max_over_ranks(*seconds, took, sent)
        self.budget.spend(told[-2], told[-1])
        return told

    def _meet(self) -> None:
        """Collective. Make ranks begin together: a wait for a late rank is no cost of an exchange or a probe."""
        self._max_over_ranks(0.0)

    def _max_over_ranks(self, *seconds: float) -> list[float]:
        """Collective. Return the maximum over ranks of each."""
        own = np.array(seconds, dtype=np.float64).tobytes()
        self.budget.spend(0.0, len(own))
        rows = gather_bytes(self.buffers.comm, own, "probe/seconds", self.buffers.config.guards.timeout)
        return [max(column) for column in zip(*(np.frombuffer(row).tolist() for row in rows), strict=True)]

    # -- sizes that double --------------------------------------------------------------------------------------

    def _sample(self, exchange: Exchange, part: float, *, packs: bool = True) -> Spread[SampledTimes]:
        """Collective. Time the sizes, smallest first, within this share of the budget: one of them at least.

        ``packs``: selecting and packing are timed, too.
        """
        times = SampledTimes({}, {}, {})
        known: list[Run] = []  # of each size
        for segment in self.segments:
            if not known:  # one message to begin with: the cost of a run is not known at all
                run = yield from self._visit(segment, exchange, SampledTimes({}, {}, {}), 1, UNKNOWN, part, packs)
            else:
                run = _expected(known, segment.numel)
                # Every rank has the same figures, so all of them stop at the same size.
                if not self.budget.allows(VISITS * run.seconds, VISITS * run.sent, part):
                    break
                dearest = run if self.bounded and packs else known[-1]  # training has sent no dense messages
                if run.seconds > self.budget.share and dearest.seconds > SLOPED * known[0].seconds:
                    break
            known.append((yield from self._visit(segment, exchange, times, RUNS, run, part, packs)))
        for segment, run in (VISITS - 1) * list(zip(self.segments, known, strict=False)):
            if self.budget.allows(run.seconds, run.sent, part) and run.seconds <= self.budget.share:
                yield from self._visit(segment, exchange, times, RUNS, run, part, packs)
        return times

    def _visit(
        self,
        segment: Segment,
        exchange: Exchange,
        times: SampledTimes,
        most: int,
        expected: Run,
        part: float,
        packs: bool,
    ) -> Spread[Run]:
        """Collective. Time up to ``most`` runs of one size, and add them to ``times``; return what a run has cost.

        ``expected``: the predicted cost of a run. ``part``, ``packs``: as for :meth:`_sample`.
        """
        yield from self._room(expected.seconds)
        runs = self.budget.runs(expected.seconds, expected.sent, most, part)
        self._meet()
        timer = self._timer(segment, exchange)
        selecting, packing = timer.time_selection(runs) if packs else (0.0, 0.0)
        travel = timer.time_exchange(runs)
        selecting, packing, travel, took, sent = self._told([timer], selecting, packing, travel)
        if timer.prepares:  # processor time goes into passes over the tensors, not into packing
            selecting, packing = selecting + packing, 0.0
        times.exchange.setdefault(timer.capacity, []).append(travel)
        times.packing.setdefault(timer.capacity, []).append(packing)
        times.selection.setdefault(segment.numel, []).append(selecting)
        return Run(segment.numel, took / runs, sent / runs)

    # -- other processor time of a message ----------------------------------------------------------------------

    def _cpu_overhead_of_message(self, exchange: Exchange, times: SampledTimes) -> Spread[float]:
        """Collective. Return the processor seconds of a small message beside selection and packing.

        That is how much longer the same work takes when messages leave and arrive in between, the maximum over ranks.
        The work hides their transfer. Where that takes long, nothing else about a message matters, and the result is 0.
        """
        between = max(BETWEEN[0], 1.5 * _fastest(times.exchange))
        on_host = self.segments[0].tensor_class.device.type == "cpu"  # a device computes while the host waits and packs
        if not on_host or between > BETWEEN[1] or BURST * between > max(self.budget.share, BURST * BETWEEN[0]):
            return 0.0
        pieces, dearest = 0, 0.0
        fastest = [math.inf, math.inf]  # with messages and without: the minimum, for other load only adds
        for turn in range(2 * ROUNDS):  # in turn, so that a load that comes or goes meets both
            yield from self._room(BURST * between)
            self._meet()
            timer = self._timer(self.segments[0], exchange)
            pieces = pieces or math.ceil(between / max(timer.time_work(10) / 10, PIECE))
            fastest[turn % 2] = min(fastest[turn % 2], timer.time_burst(0 if turn % 2 else BURST, pieces))
            took, sent = self._told([timer])
            dearest = max(dearest, sent)
            if turn % 2 and not self.budget.allows(2 * took, dearest, SIZES):
                break
        (per_message,) = self._max_over_ranks((fastest[0] - fastest[1]) / BURST)
        return max(0.0, per_message - (_fastest(times.selection) + _fastest(times.packing)))

    def _overhead_per_extra_vector(self, exchange: Exchange) -> Spread[float]:
        """Collective. Return the seconds to pack the selection of one more vector into the same message.

        The maximum over ranks: a message of several vectors is compared with one of as many elements from one vector.
        They are the smallest tensors that follow each other.
        """
        whole = self.segments[-1]
        count = min(VECTORS, len(whole.slots))
        runs = [whole.slots[first : first + count] for first in range(len(whole.slots) - count + 1)]
        smallest = min(runs, key=lambda run: sum(slot.numel for slot in run))
        pair = [Segment(whole.tensor_class, smallest)], [Segment(whole.tensor_class, (slot,)) for slot in smallest]
        seconds: tuple[list[float], list[float]] = ([], [])
        took, sent = math.inf, 0.0
        for turn in range(2 * PAIRS):
            if turn > 1 and not self.budget.allows(took, sent):
                break
            yield from self._room(took)
            self._meet()
            timers = [self._timer(segment, exchange) for segment in pair[turn % 2]]
            seconds[turn % 2].append(_seconds_to_pack(timers, count))
            took, sent = self._told(timers)
        (more,) = self._max_over_ranks(statistics.median(seconds[1]) - statistics.median(seconds[0]))
        return max(0.0, more) / max(1, count - 1)


def _expected(known: list[Run], elements: int) -> Run:
    """Return the largest cost of a run of ``elements``, extrapolated from the ``known``, smaller sizes."""
    last = known[-1]
    seconds = last.seconds * elements / last.elements
    if len(known) > 1:  # that is too much where most of it is a start-up
        before = known[-2]
        slope = max(0.0, last.seconds - before.seconds) / (last.elements - before.elements)
        seconds = min(seconds, last.seconds + slope * (elements - last.elements))
    return Run(elements, seconds, last.sent * elements / last.elements)


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


def _least(samples: Samples) -> Samples:
    """Return the least seconds of each size: a sample is of several runs already, and other load only adds."""
    return {size: [min(runs)] for size, runs in samples.items()}


def _plus(seconds: float, samples: Samples) -> Samples:
    """Return the samples with so many seconds added to each."""
    return {size: [measured + seconds for measured in runs] for size, runs in samples.items()}
