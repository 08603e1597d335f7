# SPDX-License-Identifier: Apache-2.0
"""Compare runs: accuracy, time to accuracy, throughput and bytes, as a table and as curves.

python examples/report.py runs/*/log.jsonl --target 0.7
python examples/report.py runs/*/log.jsonl --target 0.7 --picture out.svg --dense NAME --markdown
python examples/report.py */trainer_state.json my_run/log.jsonl --metric eval_loss

Logs are those of ``train.py``, a Trainer's ``trainer_state.json``, and those of any script that writes a JSON object a
line: ``step`` and figures such as ``loss``, and, where it has them, ``seconds`` and ``bytes_sent`` since the start,
``compression`` and ``workers``. Without a target the figures are those of whole runs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from reporting import logs
from reporting.comparison import Row, Spread, rows

NOTHING = "-"  # in a cell without a value


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("logs", type=Path, nargs="+", metavar="LOG", help="log.jsonl of a run, or its folder")
    add("--metric", default="loss", metavar="NAME", help="of logs of other scripts than train.py (default: loss)")
    add("--target", type=float, metavar="METRIC", help="of the metric; without it each run's own, or the last")
    add("--dense", metavar="NAME", help="the run to compare with; without it that without compression")
    add("--picture", type=Path, metavar="FILE", help="draw the curves there (.svg, .png, .pdf: needs matplotlib)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    form.add_argument("--json", action="store_true", help="print the rows as JSON")
    return parser.parse_args(argv)


def read_all(paths: Iterable[Path], metric: str = "loss") -> list[logs.Run]:
    """Return the runs of files or folders, and print the notes on them; ``ValueError`` for a broken one."""
    runs = [logs.read(path / "log.jsonl" if path.is_dir() else path, metric) for path in paths]
    for run in runs:
        if run.note:
            print(run.note, file=sys.stderr)
    return runs


def table(found: Sequence[Row], markdown: bool = False) -> str:
    """Return the rows for people. The first line names the columns; those in which no row has anything are left out."""
    heads = list(COLUMNS)
    lines = [[COLUMNS[head](row) for head in heads] for row in found]
    used = [number for number in range(len(heads)) if any(line[number] for line in lines)]
    cells = [[line[number] for number in used] for line in [heads, *lines]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = [[text.ljust(width) for text, width in zip(line, widths, strict=True)] for line in cells]
    if markdown:
        padded.insert(1, ["-" * width for width in widths])
        return "\n".join(f"| {' | '.join(line)} |" for line in padded)
    return "\n".join("  ".join(line).rstrip() for line in padded)


def as_json(found: Sequence[Row]) -> str:
    """Return the rows for programs; what is infinite, for there is none, is null."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(one) for key, one in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps([finite(asdict(row)) for row in found], indent=2)


def number(value: float) -> str:
    """Return four digits, and all of those before the point."""
    if not math.isfinite(value):
        return NOTHING
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def ranged(value: Spread) -> str:
    """Return the median, and the range where there is one."""
    if value.low == value.high:
        return number(value.median)
    return f"{number(value.median)} ({number(value.low)} to {number(value.high)})"


def _replicas(row: Row) -> str:
    return {True: "equal", False: "DIFFERENT", None: NOTHING}[row.replicas_equal]


COLUMNS: dict[str, Callable[[Row], str]] = {
    "job": lambda row: row.job,
    "compression": lambda row: row.compression + (f" {row.density:g}" if row.density is not None else ""),
    "other": lambda row: " ".join(f"{key}={value}" for key, value in row.other.items()),
    "workers": lambda row: str(row.workers),
    "runs": lambda row: str(len(row.runs)) if len(row.runs) > 1 else "",
    "best": lambda row: f"{row.metric} {ranged(row.best)}",
    "train s": lambda row: ranged(row.train_seconds),
    "wall s": lambda row: ranged(row.wall_seconds),
    "steps": lambda row: ranged(row.steps),
    "link MB": lambda row: ranged(row.megabytes),
    "x dense": lambda row: number(row.times_dense),
    "samples/s": lambda row: f"{ranged(row.samples_per_second)} {row.unit}",
    "exposed ms": lambda row: ranged(row.exposed_ms),
    "replicas": _replicas,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, and draw the picture; ``SystemExit`` with a sentence for what cannot be read."""
    args = arguments(argv)
    try:
        runs = read_all(args.logs, args.metric)
        found = rows(runs, args.target, args.dense)
        print(as_json(found) if args.json else table(found, args.markdown))
        if args.picture is not None:
            from reporting import curves

            curves.draw(runs, args.picture, args.target)
    except (OSError, ValueError, ImportError) as error:
        raise SystemExit(f"report.py: {error}") from None


if __name__ == "__main__":
    main()
