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
from agmerge.engine.reducers import AnyReducer
from agmerge.errors import AGMergeError
from agmerge.metrics.chrome_trace import Trace, path_of
from agmerge.metrics.step_times import StepTimes
from agmerge.planning.plan_choice import mode_of
from agmerge.planning.replanner import FIRST
from agmerge.step.config import AUTO, Config
from agmerge.step.gradient_exchange import GradientExchange
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.step.plan_status import PlanStatus, unplanned
from agmerge.tensors.layout import Slot
from sparsifiers import Kind

TREATED = {  # what is done with elements, in words
    Kind.SPARSE: "selected from", Kind.LOW_RANK: "factorised", Kind.QUANTISED: "quantised", Kind.DENSE: "dense",
}  # fmt: skip


class ReportingMixin:
    """Reports of :class:`agmerge.DistributedOptimizer`, none of which changes it."""

    _reducer: AnyReducer

    @property
    def plan(self) -> merging.Plan:
        """Return the plan in use. Raises ``AGMergeError`` before the first step, when there is none."""
        return self._buffers().plan

    def _buffers(self) -> MergeBuffers:
        """Return the merge buffers in use. Raises ``AGMergeError`` before the first step, when there are none."""
        buffers = self._reducer.exchange.agreed.buffers
        if buffers is None:
            raise AGMergeError("AGM701: There is no plan yet. Ranks agree on one in the first step.")
        return buffers

    @property
    def settings(self) -> dict[str, str]:
        """Return the settings that ranks must agree on, by name and as text: compressor, memory, planner and others.

        ``"density"`` is the compressor's own target, ``"merging"`` a planner with its options, ``"plan"`` and a digest,
        or ``"groups"``.
        """
        return dict(self._reducer.exchange.agreed.config.facts())

    def stats(self) -> dict[str, Any]:
        """Return totals since construction, of this rank; ``buffers`` and ``residual_norm`` (L2) are as of now.

        ``steps``: of the optimizer; ``exchanges`` are as many, unless ``every=`` leaves steps out.
        ``bytes_sent``: handed to collectives for gradients, with headers and padding; ``wire``: the same bytes
        by codecs of indices and values, ``header``, ``votes`` (of ``masked``), ``plain``. ``bytes_dense``: those of a
        dense float32 all-reduce. ``link_bytes``: of ``bytes_sent``, those that have left this rank by the
        collective's algorithm, so that exchanges compare for any number of workers: 2 (W-1)/W of the bytes of an
        all-reduce (a ring), W - 1 copies of gathered ones, of shards those of other ranks; within nodes and
        between them. ``link_bytes_dense``: likewise, of ``bytes_dense``. For a lone worker both are 0.
        ``traffic_reduction``: ``link_bytes_dense / link_bytes``, how many times less traffic than with DDP.
        ``elements_sent``: dense tensors included. ``density``: elements sent / elements. ``steps_skipped``: see
        ``nonfinite``; their bytes are counted. ``exposed_seconds``: waiting for messages in ``synchronize()``; of
        gradients on a device, in the steps that were measured. ``compressor``: in use now, by its canonical name.
        ``planning``: "timing" (the first steps), "probing" (small messages between
        steps), "trying" (some steps with each of several plans), "settled", "known" (from an earlier run), or "fixed".
        ``values``: the codec of selected values now, "auto" the gradient's own dtype; ``values_why``: the reason.
        ``exchange``: that of sparse merge buffers now; with ``exchange="fastest"`` "auto" is the default one.
        ``exchange_why``: the reason. ``quantiser``: that of dense gradients now, and ``bits``: of a coordinate,
        scales not counted; "none" and None where there is none; ``quantiser_why``: the reason.
        ``norm_inflation``: the norm of the last combined gradients over :meth:`grad_norm`, 1 where nothing is
        quantised: the noise of a quantiser makes it larger. ``bytes_probed``: of probes, since ranks agreed last; not
        in ``bytes_sent``, nor in ``link_bytes``. ``selection``: only while :meth:`measure_selection` is on.
        ``elastic``: only in an elastic job: workers ``lost``, ``left`` and ``arrived``, steps ``repeated``, at least in
        part, and the ``seconds`` of that (docs/elastic.md).
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
            "traffic_reduction": totals.link_bytes_dense / totals.link_bytes if totals.link_bytes else 1.0,
            "elements_sent": totals.elements_sent,
            "density": totals.density,
            "exposed_seconds": exchange.agreed.times.exposed,
            "planning": now.activity,
            "bytes_probed": now.bytes_probed,
            "values": now.wire,
            "values_why": now.wire_why,
            "exchange": now.exchange,
            "exchange_why": now.exchange_why,
            "quantiser": now.quantiser,
            "bits": now.bits,
            "quantiser_why": now.quantiser_why,
            "norm_inflation": exchange.norm.inflation(),
            "residual_norm": sum(norm**2 for norm in norms) ** 0.5,
            **({"selection": figures} if figures else {}),
            **({} if exchange.group.kept is None else {"elastic": dict(self._reducer.participation.changes)}),
        }

    def grad_norm(self) -> float:
        """Return the L2 norm of the combined gradient of the last step, without the noise of quantisation.

        Dense training would log the same: the norm of the mean over workers (of the sum, with ``op=Sum``), without
        a loss scale, before the script clips or changes anything. It is there from ``synchronize()`` on, or from the
        end of ``step()``, until the next gradients are combined; under DistributedDataParallel from the end of
        ``backward()``. All ranks get the same bits, without communication. Waits for a device. Where nothing is
        quantised, gradients are read from the first call on, with their present values: make it before clipping.

        Exact where nothing is quantised; else an estimate. Its square is right on average, and within 1 % from some
        hundred thousand elements on (``qsgd`` and ``terngrad``, with noise that depends on the gradient, deviate more).
        With a sparsifier or low rank, and with error feedback of a quantiser, it is the norm of ``p.grad``:
        of sent values, of several steps, and no gradient's. Of DTensors it is the norm of this rank's shards.

        Raises :class:`agmerge.AGMergeError` before the first step, and with ``sync="updates"`` and ``merging="dear"``,
        where gradients are never together before the optimizer steps.
        """
        config = self._reducer.exchange.agreed.config
        if config.sync.updates is not None or config.sync.model is not None:
            how = "sync='updates'" if config.sync.updates is not None else "merging='dear'"
            raise AGMergeError(
                f"AGM701: grad_norm() is not available with {how}, because there are no averaged gradients."
            )
        return self._reducer.exchange.norm.norm()

    def measure_selection(self, on: bool = True) -> None:
        """Measure selections, in ``stats()["selection"]``, since the last agreement; costs a pass or two a step.

        ``on``: False ends it.
        """
        self._reducer.exchange.agreed.observe_selection(on)

    def compression_report(self) -> str:
        """Return a table with a line for each tensor: merge buffer, class, as what it is sent now, density, elements.

        After the first step. What the plan sends dense because that is faster is ``whole``, whatever its class.
        """
        exchange = self._reducer.exchange
        return compression_table(self._buffers(), exchange.agreed.config, exchange.agreed.steps)

    def measure(self) -> merging.Measurements:
        """Collective. Measure what selection and exchanges cost now; :meth:`merge_report` predicts from it.

        The plan stays. Called after ``step()``; takes a few seconds at most. Planners that need times measure by
        themselves in the first steps: this is for the others, and for ``python -m agmerge plan``.
        """
        self._reducer.check_idle("measure()")
        exchange = self._reducer.exchange
        if exchange.agreed.plans is None or not exchange.agreed.is_valid or not exchange.agreed.times.typical():
            raise AGMergeError("AGM701: measure() requires a completed step. Call it after step().")
        with exchange.fault.recording():
            return exchange.agreed.plans.measure(exchange.agreed.step)

    @property
    def measurements(self) -> merging.Measurements:
        """Return the measurements behind the plan in use.

        Their ``save(path)`` writes a file that ``python -m agmerge plan`` reads. Raises ``AGMergeError`` if nothing was
        measured.
        """
        measured = plan_status(self._reducer.exchange).measured
        if measured is None:
            raise AGMergeError(
                f"AGM701: Nothing has been measured. Planners that use times measure the first {FIRST} steps of more "
                "than one worker. With other planners, call measure()."
            )
        return measured

    def merge_report(self) -> str:
        """Return a table of the merge buffers of a typical step: what is sent, times and predictions.

        ``sent``: what compresses their tensors; ``whole``: nothing does. Ready, start, end and exposed times are
        milliseconds since the first tensor. After the first step.
        """
        now, config = plan_status(self._reducer.exchange), self._reducer.exchange.agreed.config
        table = merge_buffers_table(
            self._buffers(), config, now.measured, self._reducer.exchange.agreed.times.typical()
        )
        return table if now.wire == AUTO else f"{table}\nselected values travel in {now.wire}: {now.wire_why}"

    def trace(self, path: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """Write a Chrome trace of the steps inside, to open in Perfetto; one file a rank (``trace.rank0.json``)."""
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
        parts.append(f"{dense} of {total} elements ({dense / total:.1%}) are sent whole, because that is faster here")
    lines.append(f"{config.compression.compressor}: {', '.join(parts)}")
    return "\n".join(lines)


def sent_as(buffers: MergeBuffers, config: Config, slot: Slot) -> str:
    """Return the name of what compresses a tensor in the plan in use; "whole" where nothing does."""
    if buffers.goes_dense(slot):
        return "whole"
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
        spans = merging.predict(plan, measured.profile, measured.costs, mode_of(plan, measured)).spans
    rows = [
        ["buffer", "tensors", "elements", "sent", "ready", "start", "end", "exposed", "predicted ready", "start", "end"]
    ]
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
    lines = [*_aligned(rows), "times in ms, from the first gradient of a step on"]
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
