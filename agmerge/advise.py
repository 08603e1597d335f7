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

import merging
from agmerge.backends import Backend
from agmerge.options.compression import cast_name
from merging import Measurements
from merging.measured import sent_whole, step_end
from sparsifiers import budget
from sparsifiers.registry import spelling

DENSITIES = (0.1, 0.01, 0.001)
WORTH = 0.03  # a gain below this share of the step is not worth compressing for
STEPS = 12  # trained before the table is printed
_ON = "AGMERGE_ADVISE"


@dataclass(frozen=True)
class Row:
    """One strategy. ``step``: predicted seconds a step; ``buffers``: merge buffers, ``dense`` of them dense."""

    strategy: str
    step: float
    finish: float
    buffers: int
    dense: int


def active() -> bool:
    """Whether this process runs under ``advise``."""
    return os.environ.get(_ON) == "1"


def conclude(
    comm: Backend, measured: Measurements, ended: Iterable[float], finish: float | None, timeout: float
) -> None:
    """Print what other strategies would cost, and end the script on every rank. Collective.

    ``ended``: when the last steps did; ``finish``: when the exchange of a typical one does, None where unknown.
    """
    took = float(np.median(np.diff(list(ended))))
    if comm.rank == 0 and finish is not None:
        sys.stdout.write(text(compare(measured, took, finish), took) + "\n")
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
    candidates: list[tuple[str, Measurements]] = []
    if measured.dense is not None:
        candidates.append(("dense", sent_whole(measured)))
        for density in DENSITIES:
            candidates.append((f"sparse, density {density:g}", replace(at(measured, density), dense=None)))
            candidates.append((f"auto, density {density:g}", at(measured, density)))
    else:
        candidates.append(("as it is", measured))
    rows = []
    for name, one in candidates:
        plan, mode = merging.best(planner, one)
        end = step_end(plan, one, mode)
        flags = plan.dense if mode != "dense" else (True,) * len(plan.counts)
        rows.append(Row(name, rest + end, end, len(plan.counts), sum(flags)))
    return tuple(sorted(rows, key=lambda row: row.step))


def at(measured: Measurements, density: float) -> Measurements:
    """The measurements as they would be at another density: exempt tensors stay as they are."""
    profile = measured.profile
    load = [
        min(budget(density, numel), numel) if work else load
        for numel, work, load in zip(profile.numel.tolist(), profile.work.tolist(), profile.load.tolist(), strict=True)
    ]
    return replace(measured, profile=merging.Profile(**{**profile.plain(), "load": np.array(load)}))


def text(rows: Sequence[Row], step: float) -> str:
    """The table and a recommendation."""
    lines = [f"{'strategy':24} {'ms a step':>10} {'gain':>7} {'merge buffers':>14} {'dense':>6}"]
    for row in rows:
        gain = f"{step / row.step:.2f}x" if row.step else "-"
        lines.append(f"{row.strategy:24} {1e3 * row.step:10.2f} {gain:>7} {row.buffers:14} {row.dense:6}")
    lines.append(f"measured now: {1e3 * step:.2f} ms a step")
    dense = next((row for row in rows if row.strategy == "dense"), None)
    if dense is None:
        lines.append("merging='dear' has no choice of exchanges, so only its own could be predicted")
    elif dense.step <= rows[0].step * (1 + WORTH):
        lines.append("recommendation: do not compress (compression='none'): dense is as fast as anything here")
    else:
        lines.append(f"recommendation: {rows[0].strategy}, {dense.step / rows[0].step:.2f} times as fast as dense")
    return "\n".join(lines)


def main(script: str, arguments: Sequence[str]) -> int:
    """Run ``script`` with ``arguments`` until its optimizer has measured enough. The exit code."""
    os.environ[_ON] = "1"
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")
    sys.stderr.write(f"{script} ended before its optimizer had made {STEPS} steps: give it more to do\n")
    return 1
