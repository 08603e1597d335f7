# SPDX-License-Identifier: Apache-2.0
"""Names and the table of ``--each`` of the synthetic benchmark, which trains with several compressors in turn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

DENSE = {"s-sgd": "none", "ssgd": "none"}  # as the ACP-SGD project calls a training that sends all elements
DEAR = "dear"  # the name of a planner, which the DeAR project passes to the same flag


def names(texts: Iterable[str]) -> list[str]:
    """Return the names that ``--each`` was given, separated by blanks or commas, once each and in their order."""
    found = [name for text in texts for name in text.split(",") if name]
    return list(dict.fromkeys(found))


def compression(name: str) -> str:
    """Return what ``compression=`` is for one of the names."""
    return DENSE.get(name.casefold(), name)


def table(runs: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Return what was measured of each compressor, beside the first, for people.

    runs: names, and the figures of the benchmark: "mean" and "interval", "unit" a second, and "bytes_sent" and
    "link_bytes" in "steps". What is fewer are bytes that leave a worker; with one alone, those that it hands over.
    """
    first = runs[0][1]
    heads = ("compressor", f"{first['unit']} per worker", f"x {runs[0][0]}", "bytes/step", "link/step", "fewer bytes")
    rows, counted = [heads], "link_bytes" if first["link_bytes"] else "bytes_sent"
    for name, figures in runs:
        sent, left = (per_step(figures, name) for name in ("bytes_sent", "link_bytes"))
        fewer = per_step(first, counted) / max(per_step(figures, counted), 1)
        rate = f"{figures['mean']:.1f} +-{figures['interval']:.1f}"
        ratio = figures["mean"] / first["mean"]
        rows.append((name, rate, f"{ratio:.2f}", f"{sent:.0f}", f"{left:.0f}", f"{fewer:.1f}x"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [[text.rjust(width) for text, width in zip(row, widths, strict=True)] for row in rows]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *line[1:]]) for row, line in zip(rows, lines, strict=True))


def per_step(figures: dict[str, Any], name: str) -> float:
    """Return how much of a total of worker 0 is of one step."""
    total: float = figures[name]
    return total / figures["steps"]
