# SPDX-License-Identifier: Apache-2.0
"""Five lines about a training for people: what is sent, how much, how long steps take, the plan, and warnings."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from agmerge.metrics.step_times import StepTimes
from agmerge.options.defaults import known_cost
from agmerge.step.agreed_state import AgreedState
from agmerge.step.config import Config
from agmerge.step.plan_status import PlanStatus
from sparsifiers import Kind
from sparsifiers.quantising.base import NONE

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
        traffic = f"{_size(sent)} per step, {ratio} an uncompressed all-reduce"
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
    if Kind.LOW_RANK in compressor.kinds:
        return str(compressor)
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
