# SPDX-License-Identifier: Apache-2.0
"""Tables and pictures of trainings: differences from dense in percent, over pairs with the same seed and text."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agmerge.metrics.paired import Interval, excess_percent, mean_interval
from evidence.contenders import DENSE

SAME = ("size", "optimizer", "tokens", "batch", "seed")  # what a pair has in common
CELL = ("size", "optimizer", "tokens", "batch", "workers", "factor", "contender")  # what a mean over seeds is of
LIMITS = (
    "This does not show times on a network, larger models, longer trainings or more workers than the table has, nor "
    "other data."
)
COLORS = (
    "black", "tab:blue", "tab:orange", "tab:red", "tab:green", "tab:purple", "tab:brown", "tab:pink", "tab:gray",
    "tab:olive", "tab:cyan",
)  # fmt: skip


def task_of(row: dict[str, Any]) -> str:
    """Return in words what has a best learning rate of its own. ``row``: a row, or settings."""
    return f"{row['size']}, {row['optimizer']}, batch {row['batch']}"


def with_dense(rows: Sequence[dict[str, Any]], best: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the rows with the loss of dense at its best rate, and with their rate divided by that one.

    Args:
        rows: of trainings.
        best: dense's rate by ``task_of``.
    """

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in SAME)

    factors = [round(row["rate"] / best[task_of(row)], 2) if task_of(row) in best else None for row in rows]
    pairs = list(zip(rows, factors, strict=True))
    dense = {key(row): row["loss"] for row, factor in pairs if row["contender"] == DENSE and factor == 1}
    return [{**row, "dense_loss": dense.get(key(row)), "factor": factor} for row, factor in pairs]


class Cell:
    """Trainings that differ in their seed alone, beside dense."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = [row for row in rows if row["dense_loss"] is not None]
        self.first, self.trained = rows[0], rows  # the last: all, also those without a pair
        losses, dense = [row["loss"] for row in self.rows], [row["dense_loss"] for row in self.rows]
        self.excess: Interval | None = mean_interval(excess_percent(losses, dense)) if self.rows else None
        self.loss = statistics.fmean(row["loss"] for row in rows)
        self.bytes = statistics.fmean(row["bytes_per_step"] for row in rows)
        self.dense_bytes = statistics.fmean(row["dense_bytes_per_step"] for row in rows)

    @property
    def minutes(self) -> float:
        """Return the minutes that the fastest training took: others may have shared their core."""
        return float(min(row["seconds"] for row in self.trained)) / 60

    @property
    def label(self) -> str:
        """Return the contender, and its learning rate if it is not dense's."""
        factor = self.first["factor"]
        return str(self.first["contender"]) + ("" if factor == 1 else f", {factor:g}x the rate")


def cells_of(rows: Iterable[dict[str, Any]]) -> list[Cell]:
    """Return the cells of these rows, in the order in which they appear."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in CELL), []).append(row)
    return [Cell(rows) for rows in found.values()]


def told(excess: Interval | None) -> str:
    """Return a mean difference with its interval as text."""
    if excess is None:
        return "no pair"
    return f"{excess.mean:+.2f} %" + ("" if excess.half is None else f" ± {excess.half:.2f}")


def by_bytes(count: float) -> str:
    """Return a number of bytes as text."""
    return f"{count / 1e6:.2f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"


def table(rows: Sequence[dict[str, Any]], best: Mapping[str, float]) -> str:
    """Return all cells as a table in Markdown, dense first, then by workers, batch and rate."""
    cells = cells_of(with_dense(rows, best))
    head = "| workers | contender | loss | excess over dense | seeds | bytes per step | traffic |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    order = sorted(cells, key=lambda cell: (cell.first["batch"], cell.first["workers"], cell.first["factor"] or 0.0))
    for cell in order:
        is_dense = cell.first["contender"] == DENSE
        count = "any" if is_dense else cell.first["workers"]
        fewer = "" if is_dense else f"{cell.dense_bytes / cell.bytes:.0f}x less"
        sent = "" if is_dense else by_bytes(cell.bytes)
        excess = "" if is_dense and cell.first["factor"] == 1 else told(cell.excess)
        seeds = len(cell.rows) or len(cell.trained)
        lines.append(f"| {count} | {cell.label} | {cell.loss:.4f} | {excess} | {seeds} | {sent} | {fewer} |")
    lines += ["", "Excess: mean over seeds of the difference from dense with the same seed, and its 95 % interval."]
    return "\n".join(lines)


# Pictures.


def require_pictures(error: Callable[[str], BaseException]) -> None:
    """Raise ``error`` unless there is matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise error("the pictures need matplotlib: pip install -r requirements-prove.txt") from None


def picture(rows: Sequence[dict[str, Any]], best: Mapping[str, float], folder: Path) -> list[Path]:
    """Draw loss by tokens, and excess with intervals; return the files."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "prove"
    from matplotlib import pyplot

    cells = [cell for cell in cells_of(with_dense(rows, best)) if cell.first["factor"] == 1]
    if not cells:
        return []
    fewest = min((cell.first["workers"] for cell in cells if cell.first["contender"] != DENSE), default=1)
    names = list(dict.fromkeys([DENSE, *(cell.first["contender"] for cell in cells)]))
    color = {name: COLORS[number % len(COLORS)] for number, name in enumerate(names)}
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for cell in cells:
        name = cell.first["contender"]
        if name == DENSE or cell.first["workers"] == fewest:
            curves = [row["curve"] for row in cell.rows or [cell.first]]
            tokens = [point[0] / 1e6 for point in curves[0]]
            means = [statistics.fmean(point[1] for point in points) for points in zip(*curves, strict=False)]
            left.plot(tokens, means, label=name, color=color[name], linewidth=2.2 if name == DENSE else 1.2)
    left.set(xlabel="million tokens", ylabel="loss on held-out text", title=f"{fewest} workers")
    left.legend(fontsize=8)
    shown = [cell for cell in cells if cell.excess is not None and cell.first["contender"] != DENSE]
    labels = [f"{cell.first['contender']}, W={cell.first['workers']}" for cell in shown]
    for place, cell in enumerate(shown):
        assert cell.excess is not None
        right.errorbar(
            cell.excess.mean, place, xerr=cell.excess.half, fmt="o", color=color[cell.first["contender"]], capsize=3
        )
    right.axvline(0.0, color="black", linewidth=0.8)
    right.set_yticks(range(len(shown)), labels, fontsize=8)
    right.invert_yaxis()
    right.set(xlabel="excess over dense, %", title="95 % intervals over seeds")
    figure.tight_layout()
    files = [folder / "prove.png", folder / "prove.svg"]
    for file in files:
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(figure)
    return files
