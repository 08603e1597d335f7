# SPDX-License-Identifier: Apache-2.0
"""Hold what a script gets that names nothing against a dense exchange: ``parity.py --cases defaults`` and ``longer``.

    python benchmarks/parity.py --cases defaults --steps 400 --seeds 2 --out runs/defaults.jsonl --report
    python benchmarks/parity.py --cases longer --steps 2000 --out runs/longer.jsonl --report

With ``exchange="sparse"`` the default is the quantiser of fewest bits that the optimizer gets, by
``options/defaults.py``: that column is the most that a default can cost, whatever the network. Every optimizer runs at
its best dense learning rate, see ``parity_optimizers.py``; ``longer`` has others too, and the table says what each
costs at its own best one.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

from accuracy import parity_report
from accuracy.parity_report import Records
from accuracy.parity_tasks import Case
from accuracy.parity_updates import updates

OPTIMIZERS = ("adamw", "sgd-decay", "lion", "muon", "adafactor")
OTHERS = ("nadam", "radam", "rmsprop", "adagrad", "adamax", "sgd")
QUANTISERS = ("eden-2", "eden-4", "int8", "eden-1")
CLIPS = (0.0, 1.0)
RATES = (1 / 3, 1.0, 2.0)
MERGED = {"merging": "threshold"}  # a plan by times would differ from run to run; it changes no bit of a quantiser


def selected(base: Case, name: str) -> Case:
    """Return ``base`` with 1 % of gradients selected."""
    memory = "dgc" if name == "dgc" and base.optimizer.startswith("sgd") else "residual"
    return replace(base, compressor=name, density=0.01, memory=memory, **MERGED)


def quantised(base: Case, name: str) -> Case:
    """Return ``base`` with a quantiser."""
    return replace(base, compressor=name, **MERGED)


def columns(base: Case) -> list[Case]:
    """Return what one row of the table compares: dense first."""
    found = [base, *(quantised(base, name) for name in QUANTISERS)]
    found.append(selected(base, "topk"))
    if not (base.clip and base.optimizer.startswith("sgd")):  # clipping a velocity is refused
        found.append(selected(base, "dgc"))
    return [*found, updates(base, **MERGED)]


def defaults(count: int) -> Iterator[tuple[list[Case], Sequence[int]]]:
    """Yield cases of fold 0 and seed 0, and the seeds to run them with, the most important ones first."""
    for clip in reversed(CLIPS):
        for name in OPTIMIZERS:
            yield columns(Case(task="lm", optimizer=name, clip=clip)), range(count)
    for name in OTHERS:
        base = Case(task="lm", optimizer=name, clip=1.0)
        yield [base, *(quantised(base, name) for name in ("eden-2", "eden-4", "int8"))], range(count)


def longer(count: int) -> Iterator[tuple[list[Case], Sequence[int]]]:
    """Yield the cases with four workers, at several learning rates and at a constant one."""
    for rate in (1.0, *(other for other in RATES if other != 1.0)):
        for name in ("adamw", "sgd-decay"):
            base = Case(task="lm", optimizer=name, workers=4, clip=1.0, rate=rate)
            seeds = range(5) if rate == 1.0 else range(max(1, count - 1))
            yield [base, *(quantised(base, name) for name in ("eden-2", "eden-4", "eden-1"))], seeds
    for name in ("adamw", "sgd-decay"):
        base = Case(task="lm", optimizer=name, workers=4, clip=1.0, rate=0.5, flat=True)
        yield [base, *(quantised(base, name) for name in ("eden-2", "eden-4"))], range(max(1, count - 1))


def named(case: Case) -> str:
    """Return the head of a column."""
    if case.sync == "updates":
        return "updates"
    return "dense" if case.compressor == "none" else case.compressor


def tables(records: Records) -> Iterator[str]:
    """Yield the lines of a Markdown table: the loss of dense, and what others cost, in percent, one row a setting."""
    rows: dict[tuple[object, ...], dict[str, list[Case]]] = {}
    for group in parity_report.groups(records):
        case = group[0]
        setting = case.workers, case.optimizer, case.clip, case.rate, case.flat
        rows.setdefault(setting, {}).setdefault(named(case), []).extend(group)
    heads = list(dict.fromkeys(head for row in rows.values() for head in row))
    yield f"| workers | optimizer | clipped | rate | {' | '.join(heads)} | pairs |"
    yield "|" + "---|" * (5 + len(heads))
    for (workers, optimizer, clip, rate, flat), row in sorted(rows.items(), key=lambda item: repr(item[0])):
        cells = [cell(records, row.get(head, [])) for head in heads]
        about = f"{rate:.2g}{', constant' if flat else ''}"
        pairs = max(len(cases) for cases in row.values())
        yield f"| {workers} | {optimizer} | {clip or ''} | {about} | {' | '.join(cells)} | {pairs} |"


def cell(records: Records, group: Sequence[Case]) -> str:
    """Return the loss of dense runs, or what others cost beside them: the mean, and its interval where there is one."""
    if not group:
        return ""
    if group[0].compressor == "none" and group[0].sync == "gradients":
        return f"{statistics.fmean(records[case]['score'] for case in group):.4f}"
    pairs = parity_report.differences(records, group)
    if not pairs:
        return "?"
    mean, half = parity_report.interval(pairs)
    return f"{mean:+.2f}" if len(pairs) == 1 else f"{mean:+.2f} ± {half:.2f}"
