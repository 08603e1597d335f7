# SPDX-License-Identifier: Apache-2.0
"""Hold ``sync="updates"`` of the library against a dense exchange: the cases of ``parity.py --cases updates``."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lab.intervals import interval

from accuracy import parity_report
from accuracy.parity_report import Records
from accuracy.parity_tasks import HIGHER_IS_BETTER, Case

LISTED = 10  # pairs; of more only the mean and the intervals are printed


def updates(base: Case, density: float = 0.05, wire: str = "sign", **more: object) -> Case:
    """Return ``base`` with ``sync="updates", density=0.05``, written out, or with other options."""
    options = {"compressor": "topk", "memory": "residual", "sync": "updates", "carry": "apply", **more}
    return replace(base, density=density, wire=wire, **options)


def local(base: Case, **more: object) -> Case:
    """Return ``base`` with the defaults of ``agmerge.LocalOptimizer``, written out, or with other options."""
    return updates(base, **{"density": 1.0, "wire": "int4", "every": 8, **more})


def stages() -> Iterator[tuple[list[Case], Sequence[int]]]:
    """Yield cases of fold 0 and seed 0, and the seeds to run them with, the most important ones first."""
    lm = Case(task="lm", optimizer="adamw")
    yield [lm, updates(lm)], range(10)
    yield [local(lm)], range(5)
    yield [updates(lm, 0.1, carry="hold"), updates(lm, 0.01, "fp32"), updates(lm, 0.1)], range(3)
    for optimizer in ("adamw", "sgd"):
        digits = Case(task="digits", optimizer=optimizer)
        yield [digits, updates(digits)], range(3)
    apart = replace(lm, halves=True)
    yield [apart, updates(apart), updates(apart, carry="hold"), local(apart)], range(3)
    for workers in (4, 8):
        more = replace(lm, workers=workers)
        yield [more, updates(more), local(more)], range(3)
    yield [local(lm, density=0.5, wire="sign")], range(5)
    yield [local(lm, every=4), local(lm, every=4, density=0.25, wire="sign")], range(3)
    yield [local(lm, fragments=4), local(lm, wire="2bit", every=4), local(lm, wire="sign", every=2)], range(3)
    yield [updates(lm, overlap=1), updates(lm, 0.03)], range(3)
    yield [replace(lm, compressor="topk", memory="residual", density=0.01)], range(2)


def settings(records: Records) -> Iterator[Records]:
    """Yield the records by task, optimizer, number of workers, data and steps: what a table is about."""
    parts: dict[tuple[object, ...], Records] = {}
    for case, record in records.items():
        setting = (case.task, case.optimizer, case.halves, case.workers, record["recipe"]["steps"])
        parts.setdefault(setting, {})[case] = record
    yield from parts.values()


def tables(records: Records) -> Iterator[str]:
    """Yield the lines of a Markdown table for each setting."""
    for part in settings(records):
        case, record = next(iter(part.items()))
        data = ", each worker its own part of the corpus" if case.halves else ""
        title, steps = parity_report.TITLES[case.task], record["recipe"]["steps"]
        yield f"{title}, {case.optimizer}, W = {case.workers}, {steps} steps{data}:\n"
        score, unit = ("accuracy", "points") if HIGHER_IS_BETTER[case.task] else ("loss", "%")
        yield f"| exchanged | {score} | difference, {unit} | Student | bootstrap | pairs, one by one | selected | all |"
        yield "|---|---|---|---|---|---|---|---|"
        yield from (row(part, group) for group in sorted(parity_report.groups(part), key=lambda group: place(group[0])))
        yield ""


def place(case: Case) -> tuple[object, ...]:
    """Return what the rows of a table are sorted by: dense first, then gradients, hold and apply."""
    return case.compressor != "none", case.sync, case.carry != "hold", case.every, case.density, case.overlap, case.rank


def named(case: Case) -> str:
    """Return what is exchanged in the case, in words."""
    if case.compressor == "none":
        return "dense"
    wire = "fp32" if case.wire == "auto" else case.wire
    turns = f", every {case.every}" if case.every > 1 else ""
    more = "".join(
        f", {name}={getattr(case, name)}"
        for name in ("fragments", "overlap")
        if getattr(case, name) > (name == "fragments")
    )
    share = "everything" if case.density == 1.0 else f"{100 * case.density:g} %"
    if case.rank:
        share = f"{case.compressor} of rank {case.rank}"
    return f"{case.carry or 'gradients'}{turns}, {share} {wire}{more}"


def row(records: Records, group: Sequence[Case]) -> str:
    """Return a line of a table: one way to exchange, its differences to the dense runs of the same seeds."""
    group = sorted(group, key=lambda case: (case.seed, case.fold))
    runs, pairs = [records[case] for case in group], parity_report.differences(records, group)
    mean = statistics.fmean(run["score"] for run in runs)
    cells = [named(group[0]), f"{mean:.2%}" if HIGHER_IS_BETTER[group[0].task] else f"{mean:.4f}"]
    if group[0].compressor == "none":
        cells += ["", "", "", f"{len(runs)} runs", "1", "1"]
    else:
        cells += compared(pairs)
        sent, dense = sum(run["bytes_sent"] for run in runs), sum(run["bytes_dense"] for run in runs)
        share = runs[0]["sparse_share"]
        whole = (1 - share) * dense if group[0].rank else sum(run["wire"]["plain"] for run in runs)
        cells += [f"{share * dense / (sent - whole):.0f}", f"{dense / sent:.0f}"]
    return f"| {' | '.join(cells)} |"


def compared(pairs: Sequence[float]) -> list[str]:
    """Return the mean difference, Student's and the bootstrap interval, and the pairs, as cells of a table."""
    if not pairs:
        return ["", "", "", "none yet"]
    mean, half = parity_report.interval(pairs)
    listed = ", ".join(f"{pair:+.2f}" for pair in pairs) if len(pairs) <= LISTED else f"{len(pairs)} pairs"
    if len(pairs) == 1:
        return [f"{mean:+.2f}", "", "", listed]
    _, low, high = interval(pairs, statistics.fmean)
    return [f"{mean:+.2f}", f"{mean - half:+.2f} to {mean + half:+.2f}", f"{low:+.2f} to {high:+.2f}", listed]
