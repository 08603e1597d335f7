# SPDX-License-Identifier: Apache-2.0
"""Statistics, tables and pictures of what ``parity.py`` measured."""

from __future__ import annotations

import datetime
import math
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from scipy.stats import t as student

from accuracy.parity_tasks import HIGHER_IS_BETTER, Case

Records = dict[Case, dict[str, Any]]

SHOWN = "../../docs/pictures"  # as the page names the folder of pictures
BY_HAND = "## Exchanging updates"  # from here on parity.md is kept as it is
TITLES = {"digits": "Handwritten digits, small CNN", "lm": "Python source text, small GPT"}
UNITS = {"digits": "points of accuracy", "lm": "% of the validation loss"}
NOTES = """\
*Difference* is compressed minus dense, averaged over pairs of runs with the same weights, batches and number of steps;
the interval is Student's, 95 %. Runs count as independent, although the folds of one seed share training images. Of
twenty intervals of compressors that cost nothing, about one excludes zero by chance. Learning rates were chosen for
the dense exchange on the same data, so read differences, not absolute figures. `bytes` is dense / sent, per worker,
with the wire of the day of the run (until 2026-11-21 eight bytes a selected element; now five).
Memory `dgc` applies the momentum before the exchange (momentum correction); with `residual` it is the optimizer's.
`compression="auto"`, the default, is to the bit `dgc` with memory `dgc` for an SGD with momentum and without weight
decay, and `topk` with `residual` elsewhere.
Memory `none` drops what is not sent. Remedies for AdamW, in the script and outside the library: `momentum` selects from
each worker's running mean of its gradients (a gradient hook; AdamW's own first moment is off, and its learning rate
0.23 times as high, because it divides by the deviation of what it gets); `lr` is that lower learning rate alone;
`update` selects from each worker's own Adam direction (a gradient hook), which SGD then applies.
"""


def differences(records: Records, group: Sequence[Case]) -> list[float]:
    """Compressed minus dense, pair by pair: points of accuracy, or percent of the dense loss."""
    found = []
    for case in group:
        if case.dense in records:
            ours, dense = records[case]["score"], records[case.dense]["score"]
            found.append(100 * (ours - dense) if HIGHER_IS_BETTER[case.task] else 100 * (ours / dense - 1))
    return found


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval; infinitely wide for a single value."""
    if len(values) < 2:
        return statistics.fmean(values), math.inf
    quantile = float(student.ppf(0.975, len(values) - 1))
    return statistics.fmean(values), quantile * statistics.stdev(values) / math.sqrt(len(values))


def groups(records: Records) -> list[list[Case]]:
    """The cases to be averaged: dense first, then by density, in the order in which they were run."""
    found: dict[tuple[Any, ...], list[Case]] = {}
    for case in records:
        found.setdefault(case.group, []).append(case)

    def place(group: list[Case]) -> tuple[Any, ...]:
        return -group[0].density, group[0].remedy != "", group[0].memory == "none"

    return sorted(found.values(), key=place)


def fewer_bytes(runs: Sequence[dict[str, Any]]) -> float:
    """How many times as much a dense ring moves from a worker.

    Of runs from before links were counted, by what is handed over: of two workers' sums and gathers it is the same.
    """
    counted = "link_bytes" if all("link_bytes" in run for run in runs) else "bytes_sent"
    dense = {"link_bytes": "link_bytes_dense", "bytes_sent": "bytes_dense"}[counted]
    return float(sum(run[dense] for run in runs) / sum(run[counted] for run in runs))


def rows(records: Records) -> Iterator[dict[str, Any]]:
    """One row a group that has pairs."""
    for group in groups(records):
        case = group[0]
        scores = [records[one]["score"] for one in group]
        row = {"case": case, "mean": statistics.fmean(scores), "runs": len(group)}
        row["worst"] = min(scores) if HIGHER_IS_BETTER[case.task] else max(scores)
        row["bytes"] = fewer_bytes([records[one] for one in group])
        row["elements"] = statistics.fmean(records[one]["density"] for one in group)
        if case.compressor == "none":
            yield {**row, "pairs": 0, "width": 0.0}
            continue
        pairs = differences(records, group)
        if pairs:
            mean, half = interval(pairs)
            bounds = {"difference": mean, "low": mean - half, "high": mean + half}
            yield {**row, **bounds, "pairs": len(pairs), "width": 2 * half}


def reading(row: dict[str, Any]) -> str:
    """What an interval says, in a word."""
    if not row["pairs"] or math.isinf(row["width"]):
        return "" if not row["pairs"] else "one pair only"
    if row["low"] <= 0 <= row["high"]:
        return "no difference shown"
    return "better" if (row["low"] > 0) == HIGHER_IS_BETTER[row["case"].task] else "worse"


def sections(records: Records) -> Iterator[tuple[tuple[str, str, int], Records]]:
    """The records by task, optimizer and number of workers."""
    found: dict[tuple[str, str, int], Records] = {}
    for case, record in records.items():
        found.setdefault((case.task, case.optimizer, case.workers), {})[case] = record
    order = {"digits": 0, "lm": 1}
    yield from sorted(found.items(), key=lambda item: (order[item[0][0]], item[0][2], item[0][1] != "sgd"))


def table(records: Records) -> str:
    """One section as a Markdown table."""
    first = next(iter(records))
    percent = first.task == "digits"
    unit = UNITS[first.task]
    score = "accuracy" if percent else "loss"
    lines = [
        f"| compressor | density | memory | {score} | worst | difference, {unit} | 95 % interval | width | pairs "
        "| bytes | reading |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows(records):
        case, form = row["case"], (lambda value: f"{value:.2%}") if percent else (lambda value: f"{value:.4f}")
        name = case.compressor + (f" of rank {case.rank}" if case.rank else "")
        name += f", remedy `{case.remedy}`" if case.remedy else ""
        start = [name, f"{case.density:g}", case.memory, form(row["mean"]), form(row["worst"])]
        if row["pairs"]:
            bounds = f"{row['low']:+.2f} to {row['high']:+.2f}"
            start += [f"{row['difference']:+.2f}", bounds, f"{row['width']:.2f}", str(row["pairs"])]
        else:
            start += ["", "", "", f"{row['runs']} runs"]
        lines.append(f"| {' | '.join([*start, format(row['bytes'], '.1f'), reading(row)])} |")
    return "\n".join(lines)


def about(records: Records) -> str:
    """How the runs of one section were made."""
    case, record = next(iter(records.items()))
    recipe = record["recipe"]
    seconds = statistics.median(one["seconds"] for one in records.values())
    optimizer = {"sgd": "SGD with momentum 0.9", "adamw": "AdamW"}[case.optimizer]
    return (
        f"{optimizer}, {case.workers} workers, {recipe['steps']} steps of {recipe['batch']} samples altogether, "
        f"highest learning rate {recipe['lr']:g} (one cycle), weight decay {recipe['decay']:g}. "
        f"{record['parameters']:,} parameters, {record['sparse_share']:.1%} of them sparse; "
        f"{record['buffers']} merge buffer(s). "
        f"A run took {seconds:.0f} s (median)."
    )


def name_of(key: tuple[str, str, int]) -> str:
    """A section's part of a picture's name."""
    task, optimizer, workers = key
    return f"{task}-{optimizer}" + (f"-{workers}-workers" if workers != 2 else "")


def draw(records: Records, key: tuple[str, str, int], folder: Path) -> list[Path]:
    """Curves of one section: a picture for each density below 1, with dense in each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    paths = []
    densities = sorted({case.density for case in records if case.compressor != "none"}, reverse=True)
    for density in densities:
        figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=90)
        colours = iter(pyplot.get_cmap("tab20").colors)
        for group in groups(records):
            case = group[0]
            dense = case.compressor == "none"
            if not dense and case.density != density:
                continue
            steps = [step for step, _ in records[case]["curve"]]
            curves = [[value for _, value in records[one]["curve"]] for one in group]
            means = [statistics.fmean(values) for values in zip(*curves, strict=True)]
            memory = "" if dense or case.memory == "residual" else f", memory {case.memory}"
            remedy = f", remedy {case.remedy}" if case.remedy else ""
            label = "dense" if dense else case.compressor + memory + remedy
            style = {"color": "black", "linewidth": 2.5} if dense else {"color": next(colours), "linewidth": 1.2}
            axes.plot(steps, means, label=label, linestyle="--" if memory.endswith("none") else "-", **style)
        if key[0] == "digits":
            axes.set_ylim(0.8, 1.0)
        axes.set_xlabel("step")
        axes.set_ylabel("test accuracy" if key[0] == "digits" else "validation loss, nats per character")
        title = f"{TITLES[key[0]]}: {key[1]}, {key[2]} workers, density {density:g}, mean of all runs"
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, ncols=2)
        figure.tight_layout()
        paths.append(folder / f"parity-{name_of(key)}-{density:g}.png")
        figure.savefig(paths[-1])
        pyplot.close(figure)
    return paths


def write(records: Records, notebook: Path, pictures: Path) -> None:
    """Write ``parity.md`` in ``notebook``, also to stdout, and the pictures; what follows BY_HAND there stays."""
    notebook.mkdir(parents=True, exist_ok=True)
    pictures.mkdir(parents=True, exist_ok=True)
    python = f"Python {platform.python_version()}"
    parts = [
        "# Training parity",
        f"{datetime.date.today().isoformat()}, `{shlex.join(['python', 'benchmarks/parity.py', *sys.argv[1:]])}`, "
        f"{os.cpu_count()} cores, torch {torch.__version__}, {python}",
        NOTES.strip(),
    ]
    for key, part in sections(records):
        task, optimizer, workers = key
        parts += [f"## {TITLES[task]}: {optimizer}, {workers} workers", about(part), table(part)]
        parts += [f"![{path.stem}]({SHOWN}/{path.name})" for path in draw(part, key, pictures)]
    file = notebook / "parity.md"
    _, by_hand, rest = (file.read_text(encoding="utf-8") if file.exists() else "").partition(BY_HAND)
    text = "\n\n".join(parts) + "\n" + (f"\n{by_hand}{rest}" if rest else "")
    print(text)
    file.write_text(text, encoding="utf-8")
