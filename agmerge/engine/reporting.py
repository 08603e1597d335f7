# SPDX-License-Identifier: Apache-2.0
"""Reports on a distributed optimizer: its plan, its figures, its tables and its traces."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch

import merging
from agmerge.engine.optimizer_wrapper import AnyReducer
from agmerge.errors import AGMergeError
from agmerge.metrics.chrome_trace import Trace, path_of
from agmerge.metrics.step_times import StepTimes
from agmerge.options.defaults import known_cost
from agmerge.planning.measuring import predicted
from agmerge.planning.replanner import FIRST
from agmerge.step.agreed_state import AgreedState
from agmerge.step.config import AUTO, Config
from agmerge.step.gradient_exchange import GradientExchange
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.step.plan_status import PlanStatus, unplanned
from agmerge.tensors.layout import Slot
from sparsifiers import Kind
from sparsifiers.quantising.base import NONE

# Five lines about a training for people: what is sent, how much, how long steps take, the plan, and warnings.

MORE = 1.05  # times the bytes of an uncompressed all-reduce, from which on there is a warning: headers alone are none


def summary_lines(
    agreed: AgreedState, now: PlanStatus, steps: int, optimizer: torch.optim.Optimizer | None
) -> list[str]:
    """Return the lines, which need no legend. Traffic is this rank's average of all steps, times are of the last ones.

    Args:

        agreed: of the exchange, with its config, totals and times.
        now: what is in use, and why.
        steps: of this rank so far.
        optimizer: the one that steps; None: it is not known.
    """
    totals, alone = agreed.totals, agreed.totals.workers == 1
    if alone:
        traffic = "none, because there is one worker"
    else:
        sent, saved = totals.link_bytes / max(1, steps), totals.reduction
        ratio = f"{saved:.2g}x less than" if saved > MORE else "about as much as" if saved > 1 / MORE else "more than"
        traffic = f"{_size(sent)} per step on average since the first one, {ratio} an uncompressed all-reduce"
    times = agreed.times.typical()
    usual = f"{1e3 * totals.whole.typical():.3g} ms per step" if totals.whole.typical() else "not measured yet"
    overlap = [] if times is None or alone else [hidden(times, behind(agreed.config))]
    warnings = list(_warnings(agreed, now, optimizer))
    return [
        f"compression: {_compression(agreed, now)}",
        f"traffic: {traffic}",
        f"time: {', '.join([usual, *overlap])}",
        f"plan: {_plan(agreed, now)}",
        f"warnings: {'; '.join(warnings) or 'none'}",
    ]


def behind(config: Config) -> str:
    """Return the name of the work that hides messages."""
    return "backward" if config.sync.updates is None and config.sync.model is None else "computation"


def hidden(times: StepTimes, work: str) -> str:
    """Return which share of the communication no step waits for, in words.

    Args:

        times: of a typical step.
        work: what goes on meanwhile.
    """
    travel, exposed = float(times.travel.sum()), float(times.exposed.sum())
    share = min(1.0, max(0.0, 1.0 - exposed / travel)) if travel > 0 else 1.0
    return f"{100 * share:.0f} % of the communication is hidden behind {work}"


def _compression(agreed: AgreedState, now: PlanStatus) -> str:
    """Return what compresses gradients now, and the reason where there was a choice."""
    compressor = agreed.config.compression.compressor
    if now.quantiser != NONE:
        bits = "" if now.bits is None else f", {now.bits:g} bits per value"
        return f"{now.quantiser}{bits} ({now.quantiser_why})"
    if Kind.SPARSE in compressor.kinds:
        return f"{compressor} ({now.exchange_why})"
    if compressor.kinds & {Kind.LOW_RANK, Kind.CUSTOM}:
        return str(compressor)
    if compressor.dtype is not None:
        return f"{compressor.name}, {8 * compressor.dtype.itemsize} bits per value (you set it)"
    return f"uncompressed ({now.quantiser_why})"


def _plan(agreed: AgreedState, now: PlanStatus) -> str:
    """Return the number of merge buffers, the planner, and whether the plan will change."""
    dense = () if agreed.buffers is None else agreed.buffers.plan.dense
    count = f"{len(dense)} merge buffer{'s' * (len(dense) != 1)}"
    if agreed.config.compression.compressor.kinds - {Kind.DENSE} and any(dense):
        count += f" ({sum(dense)} uncompressed)"
    planner = dict(agreed.config.facts())["merging"].split("(")[0]
    return f"{count}, planner {planner}, {now.activity.words}"


def _warnings(agreed: AgreedState, now: PlanStatus, optimizer: torch.optim.Optimizer | None) -> Iterator[str]:
    """Yield what a reader should know, and may have missed in the log."""
    totals = agreed.totals
    if totals.steps_skipped:
        yield f"{totals.steps_skipped} steps were skipped because a gradient was infinite or NaN"
    if totals.reduction < 1 / MORE:
        yield "this setting sends more than an uncompressed all-reduce"
    cost = None if optimizer is None else known_cost(agreed.config, optimizer)
    if cost is not None:
        yield f"compression={cost.compressor!r} increased the loss by {cost.percent} % in tests with {cost.optimizer}"
    if now.activity.measures:
        yield "times will change, because measuring has not ended"


def _size(count: float) -> str:
    """Return a number of bytes with a unit."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"


TREATED = {  # what is done with elements, in words
    Kind.SPARSE: "selected from", Kind.LOW_RANK: "factorized", Kind.QUANTIZED: "quantized", Kind.DENSE: "dense",
    Kind.CUSTOM: "compressed by a class of your own",
}  # fmt: skip


class ReportingMixin:
    """Reports of :class:`agmerge.DistributedOptimizer`. None of them changes the training."""

    _inner: torch.optim.Optimizer | None  # None: it is not known which one steps
    _reducer: AnyReducer

    @property
    def plan(self) -> merging.Plan:
        """Return the merge plan in use, a :class:`merging.Plan`.

        Raises:
            agmerge.AGMergeError: Before the first step.
        """
        return self._buffers().plan

    def _buffers(self) -> MergeBuffers:
        """Return the merge buffers in use. Raises ``AGMergeError`` before the first step, when there are none."""
        buffers = self._reducer.exchange.agreed.buffers
        if buffers is None:
            raise AGMergeError("AGM701: There is no plan yet. Ranks agree on one in the first step.")
        return buffers

    @property
    def settings(self) -> dict[str, str]:
        """Return the settings that all ranks must agree on, by name and as text, for example compressor and planner.

        ``"density"`` is the compressor's own target. ``"merging"`` is a planner with its options, ``"groups"``, or
        ``"plan"`` with a digest.
        """
        return dict(self._reducer.exchange.agreed.config.facts())

    def stats(self) -> dict[str, Any]:
        """Return statistics of this rank.

        Counts and bytes are totals since construction. ``buffers``, ``residual_norm`` and settings are the present
        ones. With a single worker no bytes leave the rank.

        =======================  ======  ==============================================================================
        key                      type    meaning
        =======================  ======  ==============================================================================
        ``steps``                int     optimizer steps
        ``exchanges``            int     exchanges: as many as ``steps``, unless ``every=`` is above 1
        ``steps_skipped``        int     steps skipped because of ``nonfinite="skip"``, with their bytes counted
        ``traffic_reduction``    float   ``link_bytes_dense / link_bytes``: how many times less traffic than with DDP
        ``link_bytes``           int     bytes that left this rank for gradients, by the algorithm of each collective
        ``link_bytes_dense``     int     bytes that would have left it in uncompressed float32, with a ring all-reduce
        ``bytes_sent``           int     bytes passed to collectives for gradients, with headers and padding
        ``bytes_dense``          int     bytes that would have been passed to them in uncompressed float32
        ``wire``                 dict    ``bytes_sent`` by format of values or indices, ``header``, ``votes``, ``plain``
        ``bytes_probed``         int     bytes of measurements since ranks last agreed, not counted elsewhere
        ``elements_sent``        int     values sent, including uncompressed tensors
        ``density``              float   ``elements_sent`` / all values
        ``exposed_seconds``      float   time spent waiting in ``synchronize()`` (on a device, in measured steps only)
        ``norm_inflation``       float   norm of ``p.grad`` / :meth:`grad_norm`: above 1 because of rounding noise
        ``residual_norm``        float   L2 norm of the residuals of this rank
        ``buffers``              int     merge buffers
        ``compressor``           str     compressor in use, ``"auto"`` for the default
        ``quantizer``            str     quantizer in use, or ``"none"``
        ``bits``                 float   its bits per value, without scales, or None
        ``quantizer_why``        str     reason for this quantizer
        ``values``               str     format of selected values. ``"auto"`` is the gradient's dtype
        ``values_why``           str     reason for this format
        ``exchange``             str     exchange of selected values now
        ``exchange_why``         str     reason for this exchange
        ``planning``             str     state of the planner, see below
        ``moments``              dict    only with ``sync="updates"``: ``"kept"`` as ``"mean"`` or ``"own"``, and the
                                         ``energy_ratio`` of the mean gradient and own ones
        ``selection``            dict    figures of selections, only while :meth:`measure_selection` is on
        ``elastic``              dict    only in elastic jobs: workers ``lost``, ``left``, ``arrived``, steps
                                         ``repeated`` at least in part, and ``seconds`` of that (docs/elastic.md)
        =======================  ======  ==============================================================================

        ``planning`` is ``"timing"`` in the first steps, ``"probing"`` while messages are timed between steps,
        ``"trying"`` while plans are compared in real steps, and ``"settled"`` afterwards. It is ``"fixed"``
        if nothing is chosen from times. The keys ``quantiser`` and ``quantiser_why`` of older versions still work.

        Among W workers, m bytes count as ``2 m (W-1)/W`` link bytes in an all-reduce, and as ``m (W-1)`` in an
        all-gather. So ``link_bytes`` compare between exchanges, and between numbers of workers.

        Returns:
            A dictionary, with plain numbers and strings.
        """
        exchange = self._reducer.exchange
        totals, compressor = exchange.agreed.totals, exchange.agreed.config.compression.compressor
        sparsifier = compressor.part(Kind.SPARSE)
        figures = {} if sparsifier is None else sparsifier.figures()
        exchange.agreed.times.settle()
        now = plan_status(exchange)
        norms = [float(torch.linalg.vector_norm(r.double())) for r in self._reducer.replica.unsent().values()]
        return {
            "steps": self._reducer.replica.steps,
            "exchanges": exchange.agreed.steps,
            "steps_skipped": totals.steps_skipped,
            "compressor": compressor.name,
            "buffers": totals.buffers,
            "bytes_sent": totals.bytes_sent,
            "wire": dict(totals.wire),
            "bytes_dense": totals.bytes_dense,
            "link_bytes": totals.link_bytes,
            "link_bytes_dense": totals.link_bytes_dense,
            "traffic_reduction": totals.reduction,
            "elements_sent": totals.elements_sent,
            "density": totals.density,
            "exposed_seconds": exchange.agreed.times.exposed,
            "planning": now.activity.value,
            "bytes_probed": now.bytes_probed,
            "values": now.wire,
            "values_why": now.wire_why,
            "exchange": now.exchange,
            "exchange_why": now.exchange_why,
            "quantizer": now.quantiser,
            "bits": now.bits,
            "quantizer_why": now.quantiser_why,
            # The old spelling of two keys: scripts read them.
            "quantiser": now.quantiser,
            "quantiser_why": now.quantiser_why,
            "norm_inflation": exchange.norm.inflation(),
            "residual_norm": sum(norm**2 for norm in norms) ** 0.5,
            **({} if self._reducer.combines_gradients else {"moments": self._reducer.moments}),
            **({"selection": figures} if figures else {}),
            **({} if exchange.group.kept is None else {"elastic": dict(self._reducer.participation.changes)}),
        }

    def grad_norm(self) -> float:
        """Return the L2 norm of the averaged gradient of the last step, without the noise of quantization.

        This is the norm that uncompressed training would log: without a loss scale, and before you clip gradients. With
        ``op=Sum`` it is the norm of the sum. Call it after ``synchronize()`` or ``step()``, or with DDP after
        ``backward()``. All ranks get bitwise the same value, without communication. If nothing is quantized, ``p.grad``
        is read at the first call, so call it before you clip.

        The value is exact if nothing is quantized. Otherwise it is an estimate, within 1 % from some hundred thousand
        parameters on (``qsgd`` and ``terngrad`` deviate more). With a sparsifier, low rank, or a quantizer with error
        feedback it is the norm of ``p.grad``, which holds values of several steps. For DTensors it is the norm of this
        rank's shards.

        Raises:
            agmerge.AGMergeError: Before the first step, and with ``sync="updates"`` or ``merging="dear"``, which never
                hold all averaged gradients at once.
        """
        config = self._reducer.exchange.agreed.config
        if config.sync.updates is not None or config.sync.model is not None:
            how = "sync='updates'" if config.sync.updates is not None else "merging='dear'"
            raise AGMergeError(
                f"AGM701: grad_norm() is not available with {how}, because there are no averaged gradients."
            )
        return self._reducer.exchange.norm.norm()

    def measure_selection(self, on: bool = True) -> None:
        """Start or stop measuring how well selections represent the gradients, see ``stats()["selection"]``.

        It costs one or two passes over the gradients per step.

        Args:
            on (bool): False stops it. Default: True.
        """
        self._reducer.exchange.agreed.observe_selection(on)

    def compression_report(self) -> str:
        """Return a table of how each tensor is sent now: merge buffer, class, compressor, density and elements.

        Call it after the first step. A tensor of any class is ``uncompressed`` if that is faster.
        """
        exchange = self._reducer.exchange
        return compression_table(self._buffers(), exchange.agreed.config, exchange.agreed.steps)

    def measure(self) -> merging.Measurements:
        """Collective. Measure what selection and exchanges cost now, for predictions in :meth:`merge_report`.

        Call it after ``step()``. It takes a few seconds at most, and the plan stays. You need it only for planners that
        do not measure in the first steps, and for ``python -m agmerge plan``.

        Returns:
            The :class:`merging.Measurements`.

        Raises:
            agmerge.AGMergeError: Before the first step.
        """
        self._reducer.check_idle("measure()")
        exchange = self._reducer.exchange
        if exchange.agreed.plans is None or not exchange.agreed.is_valid or not exchange.agreed.times.typical():
            raise AGMergeError("AGM701: measure() requires a completed step. Call it after step().")
        with exchange.fault.recording():
            return exchange.agreed.plans.measure(exchange.agreed.step)

    @property
    def measurements(self) -> merging.Measurements:
        """Return the measurements that the plan in use is based on, a :class:`merging.Measurements`.

        Their ``save(path)`` writes a file for ``python -m agmerge plan``.

        Raises:
            agmerge.AGMergeError: If nothing has been measured.
        """
        measured = plan_status(self._reducer.exchange).measured
        if measured is None:
            raise AGMergeError(
                f"AGM701: Nothing has been measured. Planners that use times measure the first {FIRST} steps of more "
                "than one worker. With other planners, call measure()."
            )
        return measured

    def merge_report(self) -> str:
        """Return a table of the merge buffers in a typical step: size, compressor, measured and predicted times.

        Call it after the first step. Times are in milliseconds since the first gradient was ready. The last line says
        how much of the communication is hidden behind the backward pass.
        """
        now, config = plan_status(self._reducer.exchange), self._reducer.exchange.agreed.config
        times = self._reducer.exchange.agreed.times.typical()
        lines = [merge_buffers_table(self._buffers(), config, now.measured, times)]
        if now.wire != AUTO:
            lines.append(f"value format: {now.wire} ({now.wire_why})")
        if times is not None and self._reducer.exchange.agreed.totals.workers > 1:
            lines.append(hidden(times, behind(config)))
        return "\n".join(lines)

    def summary(self) -> str:
        """Return five lines about the training: compression, traffic, time, plan and warnings.

        Call it after the first step. Traffic is the average of this rank's steps, and the time is the median of the
        last 50. Communication is hidden if no step waits for it. :meth:`stats` returns the figures.

        Raises:
            agmerge.AGMergeError: Before the first step.
        """
        self._buffers()
        exchange = self._reducer.exchange
        now, steps = plan_status(exchange), self._reducer.replica.steps
        return "\n".join(summary_lines(exchange.agreed, now, steps, self._inner))

    def trace(self, path: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """Write a Chrome trace of the steps inside this context, to open in Perfetto.

        Args:
            path (str or path): The file. Each rank writes its own: ``trace.json`` becomes ``trace.rank0.json``.

        Raises:
            agmerge.AGMergeError: While another trace is being recorded.
        """
        return traced(self._reducer.exchange, path)


def plan_status(exchange: GradientExchange) -> PlanStatus:
    """Return what is in use in an exchange, and why; ``measured`` only while its agreement holds."""
    now = unplanned(exchange.agreed.config) if exchange.agreed.plans is None else exchange.agreed.plans.status()
    return now if exchange.agreed.is_valid else replace(now, measured=None)


def compression_table(buffers: MergeBuffers, config: Config, step: int) -> str:
    """Return the treatment of each tensor, in readiness order: one line each, and a last one with the totals.

    Args:

        buffers: those of the last agreement.
        config: its density counts.
        step: the one to come; densities may change with it.
    """
    rows = [("buffer", "tensor", "shape", "class", "sent", "density", "elements")]
    elements, dense = dict.fromkeys(Kind, 0), 0  # dense: by the plan, of those that could be compressed
    for slot in buffers.flat.tensors.slots:
        density, kind = "1", slot.tensor_class.kind
        if buffers.goes_dense(slot):
            dense += 0 if kind is Kind.DENSE else slot.numel
            kind = Kind.DENSE
        elif slot.tensor_class.sparse:
            sent = config.compression.density.at(step, slot.tensor_class.density)
            if buffers.budgets.are_chosen:
                sent = buffers.budgets.of_tensor(slot, step) / slot.numel
            density = f"{sent:.3g}"
        elif slot.tensor_class.kind is Kind.LOW_RANK and buffers.flat.bases is not None:
            density = f"{buffers.flat.bases.elements(slot) / slot.numel:.3g}"
        shape = "x".join(map(str, slot.shape)) or "scalar"
        treated = slot.tensor_class.kind.value, sent_as(buffers, config, slot), density
        elements[kind] += slot.numel
        rows.append((str(buffers.buffer_of[slot.index]), slot.name, shape, *treated, str(slot.numel)))
    lines = _aligned(rows)
    total = buffers.flat.tensors.numel
    parts = [
        f"{elements[kind]} of {total} elements ({elements[kind] / max(total, 1):.1%}) are {what}"
        for kind, what in TREATED.items()
        if kind in config.compression.compressor.kinds
    ]
    if dense:
        parts.append(
            f"{dense} of {total} elements ({dense / total:.1%}) are sent uncompressed, because that is faster here"
        )
    lines.append(f"{config.compression.compressor}: {', '.join(parts)}")
    return "\n".join(lines)


def sent_as(buffers: MergeBuffers, config: Config, slot: Slot) -> str:
    """Return the name of what compresses a tensor in the plan in use; "uncompressed" if nothing does."""
    if buffers.goes_dense(slot):
        return "uncompressed"
    if buffers.is_quantised(slot) and buffers.quantiser is not None:
        return buffers.quantiser.name
    part = config.compression.compressor.part(slot.tensor_class.kind)
    return config.compression.compressor.name if part is None else part.name


def merge_buffers_table(
    buffers: MergeBuffers, config: Config, measured: merging.Measurements | None, times: StepTimes | None
) -> str:
    """Return as what each merge buffer is sent, and its times in a typical step, beside the predicted ones, in ms.

    Args:

        buffers: those of the last agreement.
        config: has the compressor.
        measured: the measurements behind the plan; None: nothing is predicted.
        times: of a typical step, since its first tensor; None: there was no step.
    """
    plan, slots = buffers.plan, buffers.flat.tensors.slots
    spans: Sequence[merging.Span] = ()
    if measured is not None:
        spans = predicted(plan, measured).spans
    heads = [f"{name} (ms)" for name in ("ready", "start", "end", "exposed", "predicted ready", "start", "end")]
    rows = [["buffer", "tensors", "elements", "sent", *heads]]
    for index, (start, stop) in enumerate(plan.bounds):
        elements = sum(slot.numel for slot in slots[start:stop])
        sent = dict.fromkeys(sent_as(buffers, config, slot) for slot in slots[start:stop])
        row = [str(index), str(stop - start), str(elements), "+".join(sent)]
        if times is not None:
            ready, end = times.handed[index], times.arrived[index]
            free = times.arrived[index - 1] if index else 0.0
            row += [_ms(ready), _ms(max(ready, free)), _ms(end), _ms(times.exposed[index])]
        row += ["-"] * (8 - len(row))
        row += [_ms(seconds) for seconds in spans[index]] if spans else ["-"] * 3
        rows.append(row)
    if max(plan.parts) > 1:
        for row, parts in zip(rows, ("parts", *map(str, plan.parts)), strict=True):
            row.insert(4, parts)
    lines = [*_aligned(rows), "times count from the first gradient of a step"]
    if spans and times is not None:
        ratio = times.finish / spans[-1].end if spans[-1].end else 1.0
        lines.append(f"measured / predicted finish: {ratio:.2f}")
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    """Return seconds as milliseconds with two digits."""
    return f"{1e3 * seconds:.2f}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines, with columns as wide as their longest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


@contextmanager
def traced(exchange: GradientExchange, path: str | os.PathLike[str]) -> Iterator[None]:
    """Record the steps inside, and write them to a file of this rank's own, named by :func:`path_of`.

    Raises ``AGMergeError`` while another trace is being recorded.
    """
    times = exchange.agreed.times
    if times.trace is not None:
        raise AGMergeError("AGM701: trace(): a trace is already being recorded. End it first.")
    rank, size = (exchange.group.comm.rank, exchange.group.comm.size) if exchange.group.comm is not None else (0, 1)
    trace = Trace(rank, f"rank {rank}")
    times.record(trace)
    exchange.agreed.describe_to(trace)
    try:
        yield
    finally:
        times.record(None)
        trace.save(path_of(path, rank, size))
