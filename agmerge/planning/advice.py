# SPDX-License-Identifier: Apache-2.0
"""Prediction of each strategy's cost on this machine and network, from the measurements of a run.

It uses the measured curves, so it takes seconds, not a training run for each strategy. ``python -m agmerge advise``
prints it, see ``cli/advise.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

import merging
from agmerge.planning.measuring import BY_NAME, LOW_RANK
from agmerge.planning.plan_choice import mode_of
from merging import Measurements
from merging.measured import sent_whole, step_end
from sparsifiers import budget

DENSITIES = (0.1, 0.01, 0.001)
RANKS = (1, 4, 16)
WORTH = 0.03  # a gain below this share of the step is not worth compressing for
# Results of docs/parity.md for small models, by density: with Adam's relatives, and with SGD and momentum.
KNOWN = {
    True: {
        0.1: "with AdamW it cost 0.1 to 5.7 % of the loss of small language models",
        0.01: "with AdamW it cost 22 to 40 % of the loss of small language models",
        0.001: "with AdamW it cost 31 % of the loss of a small language model",
    },
    False: {
        0.1: "not measured with SGD; 1 % cost 0 to 0.3 points of digits, 8 to 18 % of a small language model's loss",
        0.01: "with SGD it cost 0 to 0.3 points of accuracy on digits, 8 to 18 % of the loss of a small language model",
        0.001: "with SGD it cost 0.7 to 0.9 points of accuracy on digits",
    },
}


@dataclass(frozen=True)
class Row:
    """Prediction of one strategy."""

    strategy: str  # as it is printed
    step: float  # seconds
    finish: float  # seconds from the start of backward to the end of the last exchange
    buffers: int  # merge buffers
    dense: int  # of these, those that are sent dense
    density: float | None = None  # None: dense tensors or factors are sent


def predicted_step(plan: merging.Plan, measured: Measurements, overhead: float) -> float:
    """Return the seconds of a step under ``plan``. ``overhead``: its seconds without backward and exchanges."""
    return overhead + step_end(plan, measured, mode_of(plan, measured))


def compare(measured: Measurements, step: float, finish: float) -> tuple[Row, ...]:
    """Return the strategies, fastest first. ``step``, ``finish``: measured seconds of a step, and of its last exchange.

    A strategy changes when the last exchange ends; the overhead of a step (forward, update) is taken as measured.
    Densities and ranks change how much is sent; selection, or projection, costs as much as that of the compressor in
    use.
    """
    planner = merging.get("agmerge")
    overhead = max(0.0, step - finish)
    rows = []
    for name, chosen, assumed in _candidates(measured):
        plan, mode = merging.best(planner, assumed)
        end = step_end(plan, assumed, mode)
        flags = plan.dense if mode != "dense" else (True,) * len(plan.counts)
        compressed = None if all(flags) else chosen
        rows.append(Row(name, overhead + end, end, len(plan.counts), sum(flags), compressed))
    return tuple(sorted(rows, key=lambda row: row.step))


def _candidates(measured: Measurements) -> Iterator[tuple[str, float | None, Measurements]]:
    """Yield each strategy: its name, its density if it has one, and the measurements as they would be."""
    if measured.dense is None:
        yield "as it is", None, measured
        return
    yield "dense", None, sent_whole(measured)
    rank = dict(measured.facts).get(LOW_RANK)
    if rank is None:
        for density in DENSITIES:
            yield f"sparse, density {density:g}", density, replace(at(measured, density), dense=None)
            yield f"auto, density {density:g}", density, at(measured, density)
    elif rank == BY_NAME:
        yield "compressed, as it is", None, replace(measured, dense=None)
        yield "auto, as it is", None, measured
    else:
        for other in RANKS:
            scaled = at_rank(measured, int(rank), other)
            yield f"low rank, rank {other}", None, replace(scaled, dense=None)
            yield f"auto, rank {other}", None, scaled


def at(measured: Measurements, density: float) -> Measurements:
    """Return the measurements as they would be at another density: exempt tensors stay as they are."""
    return _with_loads(measured, lambda numel, load: min(budget(density, numel), numel))


def at_rank(measured: Measurements, rank: int, other: int) -> Measurements:
    """Return the measurements of ``rank`` as they would be at another one: dense tensors stay as they are.

    In truth, matrices with fewer rows or columns than ``other`` have smaller factors.
    """
    return _with_loads(measured, lambda numel, load: min(math.ceil(load * other / rank), numel))


def _with_loads(measured: Measurements, load_of: Callable[[int, int], int]) -> Measurements:
    """Return the measurements with other loads.

    ``load_of``: maps elements and load of a compressed tensor to its load.
    """
    profile = measured.profile
    load = [
        load_of(numel, load) if work else load
        for numel, work, load in zip(profile.numel.tolist(), profile.work.tolist(), profile.load.tolist(), strict=True)
    ]
    return replace(measured, profile=merging.Profile(**{**profile.plain(), "load": np.array(load)}))


def text(rows: Sequence[Row], step: float, predicted: float, optimizer: str) -> str:
    """Return the table and a recommendation, with known accuracy figures for this class of ``optimizer``.

    ``step``: measured seconds; ``predicted``: the prediction for the same steps. A gain that is no larger than the
    difference of the two is not recommended.
    """
    lines = [f"{'strategy':24} {'ms a step':>10} {'gain':>7} {'merge buffers':>14} {'dense':>6}"]
    for row in rows:
        gain = f"{step / row.step:.2f}x" if row.step else "-"
        lines.append(f"{row.strategy:24} {1e3 * row.step:10.2f} {gain:>7} {row.buffers:14} {row.dense:6}")
    off = abs(predicted - step) / step
    lines.append(f"measured now: {1e3 * step:.2f} ms a step; predicted of it: {1e3 * predicted:.2f} ms")
    dense = next((row for row in rows if row.strategy == "dense"), None)
    if dense is None:
        lines.append("merging='dear' has no choice of exchanges, so only its own could be predicted")
    elif dense.step <= rows[0].step * (1 + WORTH):
        lines.append("recommendation: do not compress (compression='none'): dense is as fast as anything here")
    elif dense.step <= rows[0].step * (1 + off):
        lines.append(
            f"recommendation: unsure. {rows[0].strategy} is predicted {dense.step / rows[0].step:.2f} times as fast "
            f"as dense, but the prediction of the steps just measured is {100 * off:.0f} % off. Try both"
        )
    else:
        lines.append(f"recommendation: {rows[0].strategy}, {dense.step / rows[0].step:.2f} times as fast as dense")
    if dense is not None and dense.step > rows[0].step * (1 + WORTH):
        if rows[0].density is not None:
            known = KNOWN["adam" in optimizer.lower()][rows[0].density] + " (our runs, docs/parity.md)"
            lines.append(f"accuracy with {optimizer}: {known}. Compare a short run with dense")
        elif rows[0].dense < rows[0].buffers:
            lines.append(f"accuracy with {optimizer}: it depends on the rank. Compare a short run with dense")
    return "\n".join(lines)
