"""Train with several compressors in turn, and compare them: what ``--each`` of the synthetic benchmark does."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Iterable, Sequence
from typing import Any

from options import CASTS

import sparsifiers

PUBLISHED = {"s-sgd": "none", "ssgd": "none"}  # the ACP-SGD project's names for what all elements are sent by


def names(texts: Iterable[str]) -> list[str]:
    """Return the names that ``--each`` was given, separated by blanks or commas, once each and in their order."""
    found = [name for text in texts for name in text.split(",") if name]
    return list(dict.fromkeys(found))


def settings_for(args: Namespace, name: str) -> Namespace:
    """Return the command line of one compressor: of the flags for compressors, those that mean something to it."""
    compression = PUBLISHED.get(name.casefold(), name)
    given = {**vars(args), "compression": compression}
    selects = compression not in CASTS and is_sparsifier(compression)
    if not selects:
        given["density"] = None
    if selects or compression in CASTS:
        given["rank"] = None
    if compression in CASTS:
        given["exchange"] = None
    return argparse.Namespace(**given)


def is_sparsifier(name: str) -> bool:
    """Tell whether a sparsifier is called ``name``."""
    try:
        return sparsifiers.get(name).selects
    except ValueError:
        return False  # low rank, or a name that the library refuses with the list of those that there are


def table(runs: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Return what was measured of each compressor, beside the first, for people.

    runs: names, and the figures of the benchmark: "mean" and "interval", "unit" a second, and "bytes_sent" in "steps".
    """
    first = runs[0][1]
    heads = ("compressor", f"{first['unit']} per worker", f"x {runs[0][0]}", "bytes/step", "fewer bytes")
    rows = [heads]
    for name, figures in runs:
        sent = sent_per_step(figures)
        rate = f"{figures['mean']:.1f} +-{figures['interval']:.1f}"
        ratio = figures["mean"] / first["mean"]
        rows.append((name, rate, f"{ratio:.2f}", f"{sent:.0f}", f"{sent_per_step(first) / max(sent, 1):.1f}x"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [[text.rjust(width) for text, width in zip(row, widths, strict=True)] for row in rows]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *line[1:]]) for row, line in zip(rows, lines, strict=True))


def sent_per_step(figures: dict[str, Any]) -> float:
    """Return the bytes that worker 0 has sent in a step."""
    return figures["bytes_sent"] / figures["steps"]
