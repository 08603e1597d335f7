# SPDX-License-Identifier: Apache-2.0
"""Probes of what selection and messages cost here: real messages, timed between steps.

They use the sparsifier, the packing and the collective of training, and are spread over steps, within a
:class:`Budget`. They are made in pieces: a generator yields where it has to wait for the end of another step.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch

from agmerge.backends.handshake import gather_bytes
from agmerge.exchanges import Exchange, InFlight, SegmentBuffers
from agmerge.exchanges.message.format import RoundHeader
from agmerge.metrics.step_times import Seconds
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.tensors.layout import Layout, Segment, TensorClass
from merging import Curve, Pieces
from sparsifiers import Kind, Selection, Sparsifier

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
    """Account of probes. Figures are the maximum over ranks, so every rank stops at the same point."""

    def __init__(self, step: float, gradient: int, *, at_once: bool = False) -> None:
        """Set the limits where a step takes ``step`` seconds and all gradients ``gradient`` bytes.

        ``at_once``: all probes follow one step, however long they take.
        """
        self.share = math.inf if at_once else share_of(step)  # seconds, after one step
        self._seconds = max(SECONDS, STEPS * step)
        self._bytes = max(FLOOR, GRADIENTS * gradient)
        self.seconds, self.bytes = 0.0, 0.0  # spent so far
        self._here = 0.0  # seconds spent after the step that has just ended

    def spend(self, seconds: float, sent: float) -> None:
        """Count a probe that took so many seconds and handed so many bytes to collectives."""
        self.seconds, self.bytes, self._here = self.seconds + seconds, self.bytes + sent, self._here + seconds

    def next_step(self) -> None:
        """Begin the account of the next step."""
        self._here = 0.0

    def fits(self, seconds: float) -> bool:
        """Return whether a probe of so many seconds may follow the step that has just ended. The first one may."""
        return self._here == 0.0 or self._here + seconds <= self.share

    def runs(self, seconds: float, sent: float, part: float) -> int:
        """Return how many runs of so many seconds and bytes each fit after this step, from 1 to ``RUNS``.

        ``part``: share of the whole budget that may be used.
        """
        room = min(self.share - self._here, part * self._seconds - self.seconds)
        bytes_left = part * self._bytes - self.bytes
        fitting = [left / each for left, each in ((room, seconds), (bytes_left, sent)) if each > 0]
        return max(1, int(min([RUNS, *fitting])))

    def allows(self, seconds: float, sent: float, part: float) -> bool:
        """Return whether so many more seconds and bytes fit into ``part``, a share of the whole budget."""
        return self.seconds + seconds <= part * self._seconds and self.bytes + sent <= part * self._bytes


# One message, timed.

PIECE_OF_WORK = torch.ones(128, 128)  # its product with itself takes about a tenth of a millisecond


class Times(NamedTuple):
    """Seconds of one message."""

    selecting: float
    packing: float  # and starting it
    travel: float  # until it has arrived; of a dense message packing is a part of this
    writing: float  # to write the update; 0 if that is not timed


def now(device: torch.device) -> float:
    """Return a time in seconds, when the device has finished all queued work."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)  # between steps: nothing else runs
    return time.perf_counter()


class MessageTimer:
    """Timer of a message of one segment, selected from and exchanged as in a step: this rank's own times.

    Residuals and updates in use are not written to. It is for use between two steps: then memory changes places.
    """

    def __init__(
        self, buffers: MergeBuffers, segment: Segment, exchange: Exchange, step: int, busy: float, writes: bool
    ) -> None:
        """Prepare the segment, which is selected from if the exchange is a sparse one.

        ``busy``: seconds that this rank computes after a message has left. ``writes``: updates are written, elsewhere.
        """
        self._buffers, self._segment, self._exchange, self._step = buffers, segment, exchange, step
        self._busy, self._writes = busy, writes
        self.sent = 0  # bytes handed to collectives
        self.load = 0  # elements of the last message
        self._selects = exchange.sparse and segment.tensor_class.sparse
        # Factors are made of segments, or few bits, tensor by tensor: processor time goes into passes over tensors.
        self._prepares = exchange.prepares is not None
        work, update = buffers.flat.operands(segment).work, buffers.flat.operands(segment).update
        if exchange.prepares is Kind.QUANTISED:  # zeros might be quantised faster
            work = torch.linspace(-1.0, 1.0, segment.length, device=work.device).to(work.dtype)
        elif not exchange.sparse:  # summed where it lies; it is free between steps, unless the last update is in it
            work = torch.zeros_like(work) if work.data_ptr() == update.data_ptr() else work.zero_()
        if writes or exchange.prepares is Kind.QUANTISED:
            update = torch.empty_like(update)
        self._operands = SegmentBuffers(segment, work, update)

    def send(self) -> Times:
        """Collective. Select, send and receive one message."""
        device = self._segment.tensor_class.device
        began = now(device)
        selection = self._select()
        selected = now(device)
        flags = (False,) * len(self._segment.slots)
        header = RoundHeader(self._step, self._buffers.fingerprint, 0, 0, flags)
        in_flight = self._exchange.start("probe", [self._operands], [selection], header)
        packed = now(device)
        self._compute_beside(in_flight)
        self._exchange.wait(in_flight)
        arrived = now(device)
        if self._writes:
            self._exchange.finish(in_flight)
        written = now(device)
        self.sent, self.load = self.sent + in_flight.bytes, self._elements(selection)
        if self._prepares:
            return Times(packed - began, 0.0, arrived - packed, written - arrived)
        left = selected if selection is None else packed
        return Times(selected - began, packed - selected, arrived - left, written - arrived)

    def _select(self) -> Selection | None:
        """Select from the segment under a key of its own; return None if it is sent dense."""
        if not self._selects:
            return None
        part = self._buffers.config.compression.compressor.part(Kind.SPARSE)
        assert part is not None  # the tensor class is a sparse one
        sparsifier = cast(Sparsifier, part.unobserved)  # figures are of training, and not of probes
        work, k, shapes = self._buffers.vector(self._operands, self._step)
        key = f"probe of {self._segment.numel}"
        return sparsifier.select(work, k=k, key=key, step=self._step, shapes=shapes)

    def _compute_beside(self, in_flight: InFlight) -> None:
        """Keep a core busy until a message has arrived, for as long as backward goes on after it.

        In training the network's threads share the cores with backward, so messages take longer than on an idle host.
        """
        shares_cores = self._segment.tensor_class.device.type == "cpu" and self._exchange.can_poll
        start = time.monotonic()
        while shares_cores and time.monotonic() - start < self._busy and not self._exchange.arrived(in_flight):
            torch.mm(PIECE_OF_WORK, PIECE_OF_WORK)

    def _elements(self, selection: Selection | None) -> int:
        """Return the elements of a message."""
        bases = self._buffers.flat.bases
        if self._exchange.factorises and bases is not None:
            return sum(map(bases.elements, self._segment.slots))
        return self._segment.numel if selection is None else selection.indices.numel()


# The probes.

GROWTH = 2.0  # of the sizes, at least
RUNS = 6  # of one size in one visit, at most
SIZES = 0.8  # of the budget, half of it for compressed messages if there are dense ones; ranks also exchange times
VISITS = 2  # to each size, after different steps where a step has room for one of them only
SLOPED = 2.0  # times the seconds of the smallest size: beyond, costs grow with elements; seen messages bound the slope
ENOUGH = 1 << 20  # elements of a quantised message, which need memory of their own; training shows larger ones


class MeasuredCosts(NamedTuple):
    """Curves for planning: seconds over elements, the same on every rank."""

    sparsify: Curve | None  # of selection, over elements that are selected from; None: nothing is compressed
    exchange: Curve  # over elements of a message
    dense: Curve | None  # of a dense exchange, over elements; None: no merge buffer has the choice
    message: Curve | None = None  # processor time of a message, over its elements; None: not known


class Sample(NamedTuple):
    """Cost of one run of one size: of the slowest rank, and the rank that sends most."""

    work: int  # elements selected from, or sent dense
    load: int  # elements of the message
    times: Times  # means of the runs, of travel the median
    seconds: float  # of everything
    sent: float  # bytes


def probe(
    buffers: MergeBuffers, step: int, backward: float, budget: Budget, *, bounded: bool = False
) -> Pieces[MeasuredCosts]:
    """Collective. Measure what selection and exchanges cost, between steps.

    Runs of tensors of one tensor class, see :func:`measured_class`, of sizes that double, are sent as in a step. All
    seconds are the maximum over ranks, and of several visits to a size the fastest one counts: other load only adds.
    Sizes that are too costly follow the slope of smaller ones.

    Args:

        buffers: the merge buffers in use, with the messages to be timed.
        step: the one to come; its density counts.
        backward: seconds of a backward pass on this rank; half of it goes on after a message has left.
        budget: the limit, the same on all ranks.
        bounded: training's own messages bound the cost of large ones: none is probed that makes a step too long. Of
            dense ones, which are much larger, sizes still go on until one shows that costs grow with elements.
    """
    return Prober(buffers, step, backward / 2, budget, bounded).costs()


def measured_class(layout: Layout) -> TensorClass:
    """Return the tensor class to be timed: the largest that is compressed, if there is one, else the largest."""
    return max(layout.lengths, key=lambda each: (each.kind is not Kind.DENSE, layout.lengths[each]))


def sizes(layout: Layout) -> list[Segment]:
    """Return runs of tensors of the measured tensor class: from its smallest tensor to all of them.

    Each is at least ``GROWTH`` times as large as the one before, except the last one, which is the whole class. Of
    quantised tensors only the first run may have more than ``ENOUGH`` elements.
    """
    tensor_class = measured_class(layout)
    slots = tuple(slot for slot in layout.slots if slot.tensor_class == tensor_class)
    whole = Segment(tensor_class, slots)
    runs = [Segment(tensor_class, (slot,)) for slot in slots]
    runs += [Segment(tensor_class, slots[:stop]) for stop in range(2, len(slots))]
    chosen: list[Segment] = []
    for run in sorted(runs, key=lambda run: run.numel):
        if run.numel <= whole.numel / GROWTH**0.5 and (not chosen or GROWTH * chosen[-1].numel <= run.numel):
            chosen.append(run)
    chosen.append(whole)
    if tensor_class.kind is Kind.QUANTISED:
        return [run for run in chosen if run.numel <= ENOUGH] or chosen[:1]
    return chosen


class Prober:
    """Probes of one agreement, with their budget. ``busy``: seconds that ranks compute beside a message."""

    def __init__(self, buffers: MergeBuffers, step: int, busy: float, budget: Budget, bounded: bool) -> None:
        self._buffers, self._step, self._busy, self._budget, self._bounded = buffers, step, busy, budget, bounded
        self._segments = sizes(buffers.layout)

    def costs(self) -> Pieces[MeasuredCosts]:
        """Collective. Return all curves, see :func:`probe`."""
        exchanges, kind = self._buffers.probed_exchanges(), self._segments[0].tensor_class.kind
        has_choice = kind is not Kind.DENSE and self._buffers.config.chooses_dense
        samples = yield from self._sample(exchanges[kind], SIZES / 2 if has_choice else SIZES, self._bounded)
        travel, writing = _curve((each.load, each.times.travel) for each in samples), samples[0].times.writing
        if kind is Kind.DENSE:
            return MeasuredCosts(None, travel, None, Curve((0,), (writing,)))
        dense: Curve | None = None
        if has_choice:  # training has sent no dense messages
            whole = yield from self._sample(exchanges[Kind.DENSE], SIZES, False)
            dense = _curve((each.load, each.times.travel) for each in whole)
        return MeasuredCosts(
            _curve(((each.work, each.times.selecting) for each in samples), zero=True),
            travel,
            dense,
            _curve((each.load, writing + each.times.packing) for each in samples),
        )

    def _sample(self, exchange: Exchange, part: float, bounded: bool) -> Pieces[list[Sample]]:
        """Collective. Time the sizes, smallest first, within this share of the budget: one message at least."""
        budget = self._budget
        first = yield from self._visit(self._segments[0], exchange, math.inf, 0.0, part)  # to know the cost of a run
        samples: list[Sample] = []
        for segment in self._segments:
            known = samples or [first]
            seconds, sent = _expected(known, segment.numel)
            # Every rank has the same figures, so all of them stop at the same size.
            if not budget.allows(VISITS * seconds, VISITS * sent, part):
                break
            if seconds > budget.share and (seconds if bounded else known[-1].seconds) > SLOPED * known[0].seconds:
                break
            samples.append((yield from self._visit(segment, exchange, seconds, sent, part)))
        for segment, run in (VISITS - 1) * list(zip(self._segments, samples, strict=False)):
            if budget.allows(run.seconds, run.sent, part) and run.seconds <= budget.share:
                samples.append((yield from self._visit(segment, exchange, run.seconds, run.sent, part)))
        return samples or [first]

    def _visit(self, segment: Segment, exchange: Exchange, seconds: float, sent: float, part: float) -> Pieces[Sample]:
        """Collective. Time runs of one size, each of which is expected to take so many seconds and bytes."""
        if not self._budget.fits(seconds):
            yield
            self._budget.next_step()
        runs = self._budget.runs(seconds, sent, part)
        self._max_over_ranks(0.0)  # ranks begin together: a wait for a late one is no cost of an exchange
        device = segment.tensor_class.device
        writes = segment is self._segments[0] and device.type == "cpu"  # devices write while the host computes
        timer = MessageTimer(self._buffers, segment, exchange, self._step, self._busy, writes)
        began = now(device)
        selecting, packing, travel, writing = zip(*(timer.send() for _ in range(runs)), strict=True)
        took = now(device) - began
        compressor = self._buffers.config.compression.compressor
        for each in map(compressor.part, compressor.kinds):
            assert each is not None  # of each of its kinds it has one
            each.unobserved.retain(self._buffers.keys())  # drops what the probe has left
        # Thresholds may be kept for several selections, so their mean counts.
        own = statistics.fmean(selecting), statistics.fmean(packing), statistics.median(travel), min(writing)
        *times, took, bytes_sent = self._max_over_ranks(*own, took, timer.sent)
        self._budget.spend(took, bytes_sent)
        return Sample(segment.numel, timer.load, Times(*times), took / runs, bytes_sent / runs)

    def _max_over_ranks(self, *figures: float) -> list[float]:
        """Collective. Return the maximum over ranks of each."""
        self._budget.spend(0.0, 8 * len(figures))
        (every,) = gather_seconds(self._buffers, np.array(figures), name="probe/seconds")
        return [float(most) for most in every.max(axis=0)]


def gather_seconds(buffers: MergeBuffers, *columns: Seconds, name: str = "times") -> list[Seconds]:
    """Collective. Return every rank's ``columns``, float64 of shape (k,): one array (W, k) for each of them.

    Every rank passes as many numbers, seconds or others that are compared between ranks.
    """
    data = np.concatenate(columns).astype(np.float64).tobytes()
    gathered = gather_bytes(buffers.comm, data, name, buffers.config.guards.timeout)
    rows = np.array([np.frombuffer(row) for row in gathered])
    return np.split(rows, np.cumsum([len(column) for column in columns])[:-1], axis=1)


def _expected(known: Sequence[Sample], elements: int) -> tuple[float, float]:
    """Return the most seconds and bytes of a run of ``elements``, extrapolated from the ``known``, smaller sizes."""
    last = known[-1]
    seconds = last.seconds * elements / last.work
    if len(known) > 1:  # that is too much where most of it is a start-up
        before = known[-2]
        slope = max(0.0, last.seconds - before.seconds) / (last.work - before.work)
        seconds = min(seconds, last.seconds + slope * (elements - last.work))
    return seconds, last.sent * elements / last.work


def _curve(points: Iterable[tuple[int, float]], *, zero: bool = False) -> Curve:
    """Return the curve through the least seconds of each size. ``zero``: see :meth:`merging.Curve.fit`."""
    least: dict[int, float] = {}
    for size, seconds in points:
        least[size] = min(seconds, least.get(size, math.inf))
    return Curve.fit({size: [seconds] for size, seconds in least.items()}, zero=zero)
