# SPDX-License-Identifier: Apache-2.0
"""Input of planners: the tensors with their times and loads, and the costs that all ranks have measured.

Beside them are the bounds that training's own messages set to probes, and whether times have drifted since.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch

import merging
from agmerge.exchanges.low_rank.exchange import WIRES
from agmerge.exchanges.message.format import slot_bytes
from agmerge.exchanges.routing import AHEAD, send_mode
from agmerge.metrics.running_times import RunningStepTimes
from agmerge.metrics.step_times import Seconds, WholeSteps
from agmerge.planning.cost_probe import Budget, MeasuredCosts, gather_seconds, measured_class, probe
from agmerge.step.density_policy import Energies
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.tensors.layout import Slot, TensorClass
from merging import Curve, Measurements, Pieces
from merging.plan import Elements
from sparsifiers import Kind, Quantiser
from sparsifiers.quantising.base import block_size, blocks_in


def predicted(plan: merging.Plan, measured: Measurements) -> merging.Timeline:
    """Return the predicted timeline of a step under ``plan``: ahead by its labels, else in the other allowed mode."""
    others = (mode for mode in measured.modes if mode != AHEAD)
    mode = AHEAD if send_mode(plan).ahead else next(others, AHEAD)
    return merging.predict(plan, measured.profile, measured.costs, mode)


# Drift: a plan no longer fits, because times have changed since it was made.

STEADY = (0.8, 1.25)  # times the exchange seconds after the plan was made: within these, unchanged
LATE = 0.15  # of the finish: backward that moved by less is unchanged
CONFIRMATIONS = 2  # looks in a row that must see a change


class Finding(IntEnum):
    """Conclusion from measured times; of two findings the larger one counts."""

    KEEP = 0  # nothing: times are as they were when the plan was made
    PLAN = 1  # another plan, from the known costs
    PROBE = 2  # another plan, from costs that are measured again


class DriftDetector:
    """Comparison of measured times with the measurements behind one plan. Rank 0's; nothing communicates."""

    def __init__(self) -> None:
        self._findings: list[Finding] = []  # of the looks since the plan was made, or confirmed
        # Seconds of exchanges, measured / predicted, in the first of these looks; None: there was none.
        self._usual_ratio: float | None = None

    def look(
        self, plan: merging.Plan, planned_from: Measurements, ready: Seconds, travel: Seconds, load: Elements
    ) -> Finding:
        """Return the finding: other than KEEP if ``CONFIRMATIONS`` looks in a row have seen a change.

        Args:

            plan: the one in use.
            planned_from: the measurements behind it, or the last ones that led to no better plan.
            ready: when each tensor is ready, (n,), on the slowest rank.
            travel: seconds of each merge buffer's exchange, (W, m). The last rank to reach an exchange sees its own
                duration; the others waited for that rank, so the minimum counts.
            load: elements that each tensor sends from now on, (n,). Other loads than before need no confirmation.
        """
        timeline = predicted(plan, planned_from)
        ratio = float(travel.min(axis=0).sum() / sum(span.end - span.start for span in timeline.spans))
        if self._usual_ratio is None:
            self._usual_ratio = ratio
        if not np.array_equal(load, planned_from.profile.load):
            return Finding.PLAN
        finding = Finding.KEEP
        if abs(ready[-1] - planned_from.profile.backward.sum()) > LATE * timeline.finish:
            finding = Finding.PLAN
        if not STEADY[0] <= ratio / self._usual_ratio <= STEADY[1]:
            finding = Finding.PROBE
        self._findings.append(finding)
        recent = self._findings[-CONFIRMATIONS:]
        confirmed = len(recent) == CONFIRMATIONS and Finding.KEEP not in recent
        return max(recent) if confirmed else Finding.KEEP


# The tensors as planners see them.


def profile(
    buffers: MergeBuffers,
    ready: Seconds,
    step: int,
    noise: Energies | None = None,
    codec: str | None = None,
    quantiser: Quantiser | None = None,
) -> merging.Profile:
    """Return the tensors that take part in ``step``, of which the density counts.

    A load is in elements of the timed class: selected ones with index and value as they are sent, or those of factors.
    Other tensors count by their bytes.

    Args:

        ready: when each tensor is ready, in seconds since the first, never falling; (n,).
        noise: energy that selection leaves behind, (n,); None: not known.
        codec, quantiser: of selected values, or of quantised tensors; None: the one in use.
    """
    slots, timed = buffers.layout.slots, measured_class(buffers.layout)
    codec = buffers.wire if codec is None else codec
    unit = bytes_of_element(buffers, timed, step, codec, quantiser)
    load = []
    for slot in slots:
        sent, other = _elements_sent(buffers, slot, step), slot.tensor_class
        if timed.kind is not Kind.DENSE and (other.kind, other.dtype) != (timed.kind, timed.dtype):
            sent = math.ceil(sent * bytes_of_element(buffers, other, step, codec, quantiser) / unit)
        load.append(sent)
    return merging.Profile(
        [slot.name for slot in slots],
        [slot.numel for slot in slots],
        np.diff(ready, prepend=0.0),
        work=[slot.numel if slot.tensor_class.kind is not Kind.DENSE else 0 for slot in slots],
        load=load,
        noise=noise,
    )


def _elements_sent(buffers: MergeBuffers, slot: Slot, step: int) -> int:
    """Return how many elements a step sends of a tensor: selected ones, those of its factors, or all of them."""
    if slot.tensor_class.sparse:
        return min(buffers.budgets.of_tensor(slot, step), slot.numel)
    if slot.tensor_class.kind is Kind.LOW_RANK and buffers.flat.bases is not None:
        return buffers.flat.bases.elements(slot)
    return slot.numel


def bytes_of_element(
    buffers: MergeBuffers, tensor_class: TensorClass, step: int, codec: str, quantiser: Quantiser | None = None
) -> float:
    """Return the bytes of a sent element in a message, about: with its index if it was selected, or with scales.

    ``quantiser``: of quantised tensors; None: the one in use.
    """
    slots = [slot for slot in buffers.layout.slots if slot.tensor_class == tensor_class]
    quantiser = buffers.quantiser if quantiser is None else quantiser
    if tensor_class.kind is Kind.QUANTISED and quantiser is not None:
        blocks = [(slot.numel, block_size(slot.shape)) for slot in slots]
        taken = sum(blocks_in(numel, size) * quantiser.record_bytes(size) for numel, size in blocks)
        return taken / max(1, sum(numel for numel, _ in blocks))
    if not tensor_class.sparse:
        dtype = WIRES.get(codec) if tensor_class.kind is Kind.LOW_RANK else None
        return (dtype or tensor_class.dtype).itemsize
    length, count = buffers.layout.lengths[tensor_class], sum(buffers.budgets.of_tensor(slot, step) for slot in slots)
    return slot_bytes(length, min(count, length), tensor_class.dtype, codec)


# Bounds on the results of probes: how long training's own messages took to be made and to travel.
#
# Probes are short, and most of them small. On a slow link they end before the sizes of training's messages. On a busy
# machine one delayed probe makes every larger size look costly: a message was predicted to take 1 s, not 0.04. Training
# has sent its messages in many steps, so the seconds that all of one step took together are known well. They bound
# every curve. Messages in one take no longer than one after the other, and beside its start-up a message of a share of
# the elements takes about that share of the seconds.
#
# Dense messages are much larger than those that training has sent. What the curve of these says so far beyond them is
# no bound: on a busy machine probes of small messages take as long as training's messages, so the curve is flat, and a
# dense exchange of 0.5 s would take 28 ms. As many seen messages as have its bytes, one after the other, are a bound.

SLACK = 2.0  # times its share of the seconds seen: limit of a message beside its start-up


class SeenMessages(NamedTuple):
    """Times of the compressed messages of one training step together."""

    work: int  # elements that are selected from
    load: int  # elements of the messages
    making: float  # seconds of the slowest rank to select and pack; NaN: not all of it is timed
    travel: float  # seconds of the exchanges, waiting for late ranks left out


def seen_in(plan: merging.Plan, profile: merging.Profile, making: Seconds, travel: Seconds) -> SeenMessages | None:
    """Return the times of steps under ``plan``; None if nothing is compressed.

    ``making``, ``travel``: seconds of each merge buffer, (W, m). Of ``travel`` the minimum counts, as in
    :meth:`DriftDetector.look`.
    """
    compressed = [number for number, dense in enumerate(plan.dense) if not dense]
    if not compressed:
        return None
    bounds = [plan.bounds[number] for number in compressed]
    # Else messages are made while others travel, or tensors come.
    whole = max(plan.parts) == 1 and not send_mode(plan).ahead
    return SeenMessages(
        work=sum(int(profile.work[start:stop].sum()) for start, stop in bounds),
        load=sum(int(profile.load[start:stop].sum()) for start, stop in bounds),
        making=float(making.max(axis=0)[compressed].sum()) if whole else math.nan,
        travel=float(travel.min(axis=0)[compressed].sum()),
    )


def measure_costs(
    buffers: MergeBuffers, step: int, backward: float, budget: Budget, seen: SeenMessages | None
) -> Pieces[MeasuredCosts]:
    """Collective. Measure costs in pieces, between steps: probed, and bounded by seen messages, if there are any."""
    timed = measured_class(buffers.layout)
    as_many = timed.dtype.itemsize / bytes_of_element(buffers, timed, step, buffers.wire)
    if timed.kind is not Kind.QUANTISED:  # all-gathered: quantised ones are exchanged by shards, as in an all-reduce
        as_many *= 2 / buffers.across.size
    costs = yield from probe(buffers, step, backward, budget, bounded=seen is not None)
    return costs if seen is None else bounded(costs, seen, buffers.layout.numel, as_many)


def bounded(costs: MeasuredCosts, seen: SeenMessages, numel: int, as_many: float) -> MeasuredCosts:
    """Return ``costs``, as probed, bounded by seen messages. Pure.

    ``numel``: of all tensors. ``as_many``: elements of a message with as many bytes as one dense element.
    """
    sparsify, exchange, dense, message = costs
    if seen.load and seen.travel > 0.0:
        start = min(exchange.seconds[0], seen.travel)
        exchange = limited(exchange, start, seen.load, seen.travel, seen.travel)
    if sparsify is not None and message is not None and seen.work and seen.making > 0.0:
        start = message.seconds[0]  # with other processor time of a message, which is not among the seconds seen
        message = limited(message, start, seen.load, seen.making, min(message(seen.load), start + seen.making))
        left = seen.making - (message(seen.load) - start)
        sparsify = limited(sparsify, sparsify(1), seen.work, seen.making, left)
    if dense is not None:
        in_a_row = seen.travel * as_many * numel / seen.load if seen.load else 0.0
        dense = bounded_dense(dense, numel, max(exchange(as_many * numel), in_a_row))
    return MeasuredCosts(sparsify, exchange, dense, message)


def bounded_dense(dense: Curve, numel: int, seconds: float) -> Curve:
    """Return the cost of dense exchanges where one of ``numel`` elements takes about ``seconds`` at most. Pure.

    Where only one size was probed, all elements are another point: a constant would make them cost nothing.
    """
    start = dense.seconds[0]
    if len(dense.elements) == 1:
        return limited(dense, start, numel, seconds, min(seconds, start * numel / dense.elements[0]))
    return limited(dense, start, numel, seconds, min(dense(numel), start + SLACK * seconds))


def limited(curve: Curve, start: float, elements: int, seconds: float, end: float) -> Curve:
    """Return the curve of messages of which ``elements`` together took ``seconds``. Pure.

    No point of it is above ``start`` and ``SLACK`` times its share of ``seconds``. If the curve ends before
    ``elements``, these take ``end``, but no less than fewer.
    """
    most = [start + SLACK * seconds * at / elements for at in curve.elements]
    values = [min(pair) for pair in zip(curve.seconds, most, strict=True)]
    if elements <= curve.elements[-1]:
        return Curve(curve.elements, tuple(values))
    return Curve((*curve.elements, elements), (*values, max(end, values[-1])))


# The measurer: times of steps and results of probes, between steps.


class Look(NamedTuple):
    """Typical times of the steps since the last look; the same on every rank."""

    ready: Seconds  # when each tensor is ready, on the slowest rank, since the first; (n,)
    making: Seconds  # processor time of each merge buffer's messages, of every rank; (W, m)
    travel: Seconds  # of each merge buffer's exchange, of every rank; (W, m)
    step: float  # seconds of a whole step, on the slowest rank


class Measurer:
    """Measurer for the plans of one agreement. A subclass may measure more, or differently."""

    def __init__(self, buffers: MergeBuffers, times: RunningStepTimes) -> None:
        self.buffers, self.times = buffers, times  # read, and never changed here but for restart() of averages
        self.whole = WholeSteps()
        self._budgets: list[Budget] = []  # of all probes

    @property
    def bytes_probed(self) -> int:
        """Return the bytes that probes have handed to collectives, on the rank that sent most."""
        return sum(int(budget.bytes) for budget in self._budgets)

    def look(self) -> Look:
        """Collective. Return the averages of all ranks, and begin new ones."""
        own = self.times.ready(), self.times.making(), self.times.travel(), np.array([self.whole.typical()])
        ready, making, travel, step = gather_seconds(self.buffers, *own)
        self.times.restart()
        return Look(ready.max(axis=0), making, travel, float(step.max()))

    def measure(self, step: int, look: Look | None = None, *, at_once: bool = False) -> Pieces[Measurements]:
        """Collective. Measure in pieces, before ``step`` and later ones.

        ``look``: the times of steps; None: they are asked for. ``at_once``: nothing is left for later steps.
        """
        look = self.look() if look is None else look
        budget = Budget(look.step, 4 * self.buffers.layout.numel, at_once=at_once)
        self._budgets.append(budget)
        if budget.share < math.inf:  # the exchange of times has taken time, too
            yield
        costs = yield from measure_costs(self.buffers, step, float(look.ready[-1]), budget, self.seen(step, look))
        if not budget.fits(budget.share):  # no probe and no plan after the same step
            yield
        return self.with_costs(step, look.ready, costs)

    def seen(self, step: int, look: Look) -> SeenMessages | None:
        """Return what steps have shown of their messages; None: nothing that bounds the results of probes."""
        return seen_in(self.buffers.plan, profile(self.buffers, look.ready, step), look.making, look.travel)

    def with_costs(self, step: int, ready: Seconds, costs: MeasuredCosts) -> Measurements:
        """Collective. Return all that planning needs; the same on every rank but for rounding: rank 0's counts.

        ``ready``: as for :func:`profile`, on the slowest rank.
        """
        buffers, config = self.buffers, self.buffers.config
        return Measurements(
            profile=profile(buffers, ready, step, residual_energy(buffers)),
            **costs._asdict(),
            modes=config.modes,
            workers=buffers.comm.size,
            facts=(
                ("backend", buffers.comm.name),
                ("compressor", repr(config.compression.compressor)),
                ("step", str(step)),
                ("torch", torch.__version__),
            ),
        )


def residual_energy(buffers: MergeBuffers) -> Energies | None:
    """Collective. Return the squared L2 norm of each tensor's residual, (n,), the mean over ranks: its noise.

    None if there are no residuals, or one is not finite.
    """
    residuals: dict[str, torch.Tensor] = {}
    if buffers.config.compression.compressor.compresses:
        residuals = {name: tensor for (kind, name), tensor in buffers.flat.state().items() if kind == "residual"}
    nothing = torch.zeros(())
    norms = [float(torch.linalg.vector_norm(residuals.get(slot.name, nothing))) for slot in buffers.layout.slots]
    mean = gather_seconds(buffers, np.square(norms))[0].mean(axis=0)
    return mean if np.isfinite(mean).all() and mean.any() else None
