"""``python -m agmerge advise script.py ...``: what each strategy would cost on this machine and network.

Runs an unchanged training script, under its launcher, until the first steps have been measured; then it prints the
predicted step time of each strategy and ends the script. Prediction is by the curves that were measured, so it takes
seconds, not a training run for each strategy.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

import merging
from agmerge.backends import Backend
from agmerge.options.compression import cast_name
from agmerge.routing import AHEAD
from merging import Measurements
from merging.measured import sent_whole, step_end
from sparsifiers import budget
from sparsifiers.registry import spelling

DENSITIES = (0.1, 0.01, 0.001)
WORTH = 0.03  # a gain below this share of the step is not worth compressing for
STEPS = 12  # trained before the table is printed
# What docs/parity.md says of small models, by density: with Adam's relatives, and with SGD and momentum.
KNOWN = {
    True: {
        0.1: "no loss shown with AdamW on a small language model, two pairs of runs",
        0.01: "with AdamW it cost 22 to 29 % of the loss of a small language model",
        0.001: "with AdamW it cost 31 % of the loss of a small language model",
    },
    False: {
        0.1: "not measured with SGD; 1 % cost 0 to 0.3 points of digits, 8 % of the loss of a small language model",
        0.01: "with SGD it cost 0 to 0.3 points of accuracy on digits, 8 % of the loss of a small language model",
        0.001: "with SGD it cost 0.7 to 0.9 points of accuracy on digits",
    },
}
_ON = "AGMERGE_ADVISE"


@dataclass(frozen=True)
class Row:
    """One strategy. ``step``: predicted seconds a step; ``buffers``: merge buffers, ``dense`` of them dense."""

    strategy: str
    step: float
    finish: float
    buffers: int
    dense: int
    density: float | None = None  # None: all is sent


@dataclass(frozen=True)
class InUse:
    """What the steps were measured with: the plan, and the optimizer that is wrapped."""

    plan: merging.Plan
    optimizer: torch.optim.Optimizer

    def predicted(self, measured: Measurements, rest: float) -> float:
        """Seconds of a step by the same prediction as the others'; ``rest``: those that are not the exchange's."""
        mode = AHEAD if AHEAD in self.plan.labels else next(mode for mode in measured.modes if mode != AHEAD)
        return rest + step_end(self.plan, measured, mode)


def active() -> bool:
    """Whether this process runs under ``advise``."""
    return os.environ.get(_ON) == "1"


def conclude(
    comm: Backend, measured: Measurements, ended: Iterable[float], finish: float | None, in_use: InUse, timeout: float
) -> None:
    """Print what other strategies would cost, and end the script on every rank. Collective.

    ``ended``: when the last steps did; ``finish``: when the exchange of a typical one does, None where unknown.
    """
    took = float(np.median(np.diff(list(ended))))
    if comm.rank == 0 and finish is not None:
        predicted = in_use.predicted(measured, max(0.0, took - finish))
        rows = compare(measured, took, finish)
        sys.stdout.write(text(rows, took, predicted, type(in_use.optimizer).__name__) + "\n")
        sys.stdout.flush()
    comm.barrier("advise").wait(timeout)
    raise SystemExit(0)


def widened(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the optimizer; under ``advise``, so that there is something to compare.

    A script that sends everything is measured with exact top-k for these few steps.
    """
    if not active() or (isinstance(arguments["merging"], str) and spelling(arguments["merging"]) == "dear"):
        return arguments
    sends_all = cast_name(arguments["compression"]) is not None
    instead = {"compression": "topk", "memory": "residual"} if sends_all else {}
    return {**arguments, **instead, "exchange": "auto"}


def compare(measured: Measurements, step: float, finish: float) -> tuple[Row, ...]:
    """The strategies, fastest first. ``step`` and ``finish``: measured seconds of a step, and of its last exchange.

    A strategy changes when the last exchange ends; the rest of a step (forward, update) is taken as it was measured.
    Densities change how much is sent; what selection costs is taken from the compressor in use.
    """
    planner = merging.get("agmerge")
    rest = max(0.0, step - finish)
    candidates: list[tuple[str, float | None, Measurements]] = []
    if measured.dense is not None:
        candidates.append(("dense", None, sent_whole(measured)))
        for density in DENSITIES:
            candidates.append((f"sparse, density {density:g}", density, replace(at(measured, density), dense=None)))
            candidates.append((f"auto, density {density:g}", density, at(measured, density)))
    else:
        candidates.append(("as it is", None, measured))
    rows = []
    for name, share, one in candidates:
        plan, mode = merging.best(planner, one)
        end = step_end(plan, one, mode)
        flags = plan.dense if mode != "dense" else (True,) * len(plan.counts)
        compressed = None if all(flags) else share
        rows.append(Row(name, rest + end, end, len(plan.counts), sum(flags), compressed))
    return tuple(sorted(rows, key=lambda row: row.step))


def at(measured: Measurements, density: float) -> Measurements:
    """The measurements as they would be at another density: exempt tensors stay as they are."""
    profile = measured.profile
    load = [
        min(budget(density, numel), numel) if work else load
        for numel, work, load in zip(profile.numel.tolist(), profile.work.tolist(), profile.load.tolist(), strict=True)
    ]
    return replace(measured, profile=merging.Profile(**{**profile.plain(), "load": np.array(load)}))


def text(rows: Sequence[Row], step: float, predicted: float, optimizer: str) -> str:
    """Return the table and a recommendation, with what is known of its accuracy with this class of ``optimizer``.

    ``step``: measured seconds; ``predicted``: what would have been predicted of it. A gain that is no larger than the
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
    if dense is not None and rows[0].density is not None and dense.step > rows[0].step * (1 + WORTH):
        known = KNOWN["adam" in optimizer.lower()][rows[0].density]
        lines.append(f"accuracy with {optimizer}: {known} (our runs, docs/parity.md). Compare a short run with dense")
    return "\n".join(lines)


def main(script: str, arguments: Sequence[str]) -> int:
    """Run ``script`` with ``arguments`` until its optimizer has measured enough. The exit code."""
    os.environ[_ON] = "1"
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")
    sys.stderr.write(f"{script} ended before its optimizer had made {STEPS} steps: give it more to do\n")
    return 1
