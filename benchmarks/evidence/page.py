# SPDX-License-Identifier: Apache-2.0
"""Figures of the page *Evidence*, from the recorded runs in benchmarks/prove: one file of JSON for each rung."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agmerge.metrics.paired import excess_percent, mean_interval
from evidence.contenders import DENSE, EXPLAINED
from evidence.report import COLORS, Cell, by_bytes, cells_of, told, with_dense

ROOT = Path(__file__).resolve().parents[2]
PAGE, RECORDS = ROOT / "docs/evidence.md", ROOT / "benchmarks/prove"
LADDER, CURVES = ROOT / "docs/pictures/evidence.svg", ROOT / "docs/pictures/evidence_curves.svg"
MARKS = "<!-- figures: begin -->\n", "<!-- figures: end -->\n"
NONE = "No run is recorded yet.\n"
LINKS = (2e8, 1e9, 1e10)  # bits in a second
MOST_COLUMNS = 3  # of a table, beside its first one
AT = (4, 2, 8)  # numbers of workers of which the picture has one: the first that all rungs have
PANELS = (2, 4)  # numbers of workers of which there are curves
TICKS = (-10, -3, -1, 0, 1, 3, 10, 30)  # percent
Run = Mapping[str, Any]  # content of a prove.json


def record(run: Path, rung: str) -> Path:
    """Copy a run to the recorded ones, in place of the rung of this name, and return the file."""
    file = RECORDS / f"{rung}.json"
    shutil.copyfile(run, file)
    return file


def recorded() -> dict[str, Run]:
    """Return the recorded runs by the name of their rung, the smallest model first."""
    runs = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in RECORDS.glob("*.json")}
    return dict(sorted(runs.items(), key=lambda pair: (pair[1]["rows"][0]["parameters"], pair[0])))


def figures(runs: Mapping[str, Run]) -> str:
    """Return the generated part of the page: of each rung how it was made, its losses and its traffic."""
    if not runs:
        return NONE
    return "\n".join(part for name, run in runs.items() for part in rung(name, run))


def rung(name: str, run: Run) -> list[str]:
    """Return the paragraphs of a rung."""
    cells = cells_of(with_dense(run["rows"], run["best"]))
    usual = usual_of(run)
    first = usual[0].first
    parts = [f"### {first['parameters'] / 1e6:.2g} million parameters\n"]
    batches = sorted({cell.first["batch"] for cell in usual}, reverse=True)
    for batch in batches:
        here = [cell for cell in usual if cell.first["batch"] == batch]
        parts += [made(here, cells, run["data"]), losses(here)]
    largest = [cell for cell in of_largest_batch(cells) if cell.first["contender"] != DENSE]
    others = [cell for cell in largest if cell.first["factor"] not in (1, None)]
    if others:
        parts += ["Other learning rates, compared with dense at its best one:\n", at_rates(others)]
    parts += ["Traffic per worker and step, and the time that it takes on a link of that rate:\n", traffic(usual)]
    parts.append(took(largest, usual))
    commands = "\n".join(run["commands"])
    parts.append(f"To repeat these runs, with text {run['data']['digest']}:\n\n```bash\n{commands}\n```\n")
    return parts


def made(here: Sequence[Cell], cells: Sequence[Cell], data: Mapping[str, Any]) -> str:
    """Return sentences about the trainings of one batch size.

    Args:
        here: these, at dense's best learning rate.
        cells: all of the rung.
        data: facts about the text.
    """
    first = here[0].first
    dense = next(cell for cell in here if cell.first["contender"] == DENSE)
    tried = [cell.first for cell in cells if cell.first["contender"] == DENSE and cell.first["batch"] == first["batch"]]
    rates = sorted({one["rate"] for one in tried})
    tuned = f"the best of {len(rates)} that we tried ({rates[0]:g} to {rates[-1]:g})" if len(rates) > 1 else "not tuned"
    epochs = first["tokens"] / data["train"]
    seeds = "one seed" if len(dense.rows) == 1 else f"mean of {len(dense.rows)} seeds"
    often = f" The text is read {epochs:.1f} times." if epochs > 1 else ""
    return (
        f"{first['optimizer'].replace('adamw', 'AdamW')}, {first['tokens'] / 1e6:.3g} M tokens, {first['steps']} steps "
        f"of {first['batch']} tokens for all workers together. Dense training reaches a loss of {dense.loss:.4f} "
        f"({seeds}). Its learning rate is {first['rate']:g}, {tuned}.{often}\n"
    )


def took(compressed: Sequence[Cell], usual: Sequence[Cell]) -> str:
    """Return a sentence about the time of a training, at the largest batch.

    Args:
        compressed: trainings other than dense.
        usual: all at dense's best learning rate, dense among them.
    """
    dense = next(cell for cell in usual if cell.first["contender"] == DENSE)
    others = [cell.minutes for cell in compressed]
    where = "one core" if dense.first["device"] == "cpu" else "one GPU"
    return (
        f"The fastest training with dense took {dense.minutes:.1f} minutes of {where}. With the other settings, which "
        f"train all workers one after another, it took {min(others):.1f} to {max(others):.1f} minutes. Other work on "
        "the same machine is included.\n"
    )


def losses(cells: Sequence[Cell]) -> str:
    """Return the table of excess losses, a row for each contender and a column for each number of workers."""
    shown = [cell for cell in cells if cell.first["contender"] != DENSE]
    by_place = {(cell.first["contender"], cell.first["workers"]): cell for cell in shown}
    names, workers = (list(dict.fromkeys(places)) for places in zip(*by_place, strict=True))
    workers = sorted(workers)[:MOST_COLUMNS]
    rows = [[f"`{name}`", *(excess_of(by_place.get((name, count))) for count in workers)] for name in names]
    return table(["Increase of the loss", *(f"{count} workers" for count in workers)], rows)


def at_rates(cells: Sequence[Cell]) -> str:
    """Return the table of excess losses at learning rates that are not dense's best."""
    by_place = {(c.first["contender"], c.first["workers"], c.first["factor"]): c for c in cells}
    factors = sorted({factor for _, _, factor in by_place})[:MOST_COLUMNS]
    rows = [
        [f"`{name}`, {workers} workers", *(excess_of(by_place.get((name, workers, factor))) for factor in factors)]
        for name, workers in dict.fromkeys(place[:2] for place in by_place)
    ]
    return table(["Increase of the loss", *(f"{factor:g}x the rate" for factor in factors)], rows)


def traffic(cells: Sequence[Cell]) -> str:
    """Return the table of bytes and of their time, with the fewest workers and the largest batch that there are."""
    compressed = [cell for cell in cells if cell.first["contender"] not in EXPLAINED]
    least = min(cell.first["workers"] for cell in compressed)
    largest = max(cell.first["batch"] for cell in compressed)
    shown = [cell for cell in compressed if (cell.first["workers"], cell.first["batch"]) == (least, largest)]
    sent = [(DENSE, shown[0].dense_bytes), *((cell.first["contender"], cell.bytes) for cell in shown)]
    rows = [
        [
            f"`{name}`",
            by_bytes(count),
            f"{sent[0][1] / count:.0f}x",
            " / ".join(f"{float(f'{8e3 * count / link:.2g}'):g}" for link in LINKS) + " ms",
        ]
        for name, count in sent
    ]
    return table([f"{least} workers", "Bytes", "Less than fp32", "200 Mbit/s / 1 / 10 Gbit/s"], rows)


def excess_of(cell: Cell | None) -> str:
    """Return the excess loss of a cell, with the number of seeds, as text."""
    return "" if cell is None else f"{told(cell.excess)} ({len(cell.rows)})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, and an empty line."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


# The picture: excess loss by size of the model, and by batch.


def ladder(runs: Mapping[str, Run]) -> dict[str, list[tuple[float, float, float]]]:
    """Return the points of each contender: parameters, excess in %, half of its interval.

    With the first number of workers of ``AT`` that all rungs have, at the largest batch and dense's rate.
    """
    cells = [usual_of(run) for run in runs.values()]
    have = [{cell.first["workers"] for cell in here} for here in cells]
    workers = next((count for count in AT if have and all(count in one for one in have)), None)
    largest = [cell for here in cells for cell in of_largest_batch(here) if cell.first["workers"] == workers]
    return lines_of(largest, "parameters")


def by_batch(run: Run) -> dict[str, list[tuple[float, float, float]]]:
    """Return the points of each contender that has several batches: tokens of a step, excess in %, half an interval.

    With the first number of workers of ``AT`` that has several, at dense's rate for each batch.
    """
    for workers in AT:
        cells = [cell for cell in usual_of(run) if cell.first["workers"] == workers]
        found = {name: line for name, line in lines_of(cells, "batch").items() if len(line) > 1}
        if found:
            return found
    return {}


def usual_of(run: Run) -> list[Cell]:
    """Return the cells of a run at dense's learning rate."""
    return [cell for cell in cells_of(with_dense(run["rows"], run["best"])) if cell.first["factor"] == 1]


def of_largest_batch(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells with the largest batch that there is."""
    largest = max((cell.first["batch"] for cell in cells), default=0)
    return [cell for cell in cells if cell.first["batch"] == largest]


def lines_of(cells: Sequence[Cell], place: str) -> dict[str, list[tuple[float, float, float]]]:
    """Return the points of each contender but dense: ``place``, excess in %, half of its interval.

    Args:
        cells: one for each point.
        place: name of a field of a row, such as "batch".
    """
    found: dict[str, list[tuple[float, float, float]]] = {}
    for cell in cells:
        name, excess = cell.first["contender"], cell.excess
        if excess and name != DENSE:
            found.setdefault(name, []).append((float(cell.first[place]), excess.mean, excess.half or 0.0))
    return {name: sorted(line) for name, line in found.items()}


def drawn(runs: Mapping[str, Run]) -> dict[str, dict[str, list[tuple[float, float, float]]]]:
    """Return the points of each panel, by the name of its axis: those by batch are of the smallest model."""
    smallest = by_batch(next(iter(runs.values()))) if runs else {}
    return {"parameters without embeddings": ladder(runs), **({"tokens of a step": smallest} if smallest else {})}


def digest_of(points: Mapping[str, Any]) -> str:
    """Return a digest of what a picture shows."""
    rounded = {name: [[f"{value:.5g}" for value in point] for point in line] for name, line in points.items()}
    return hashlib.sha256(json.dumps(rounded, sort_keys=True).encode()).hexdigest()[:16]


def flat(panels: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the lines of all panels, by the names of panel and line."""
    return {f"{panel}: {name}": line for panel, lines in panels.items() for name, line in lines.items()}


def draw(runs: Mapping[str, Run], file: Path) -> None:
    """Draw a line for each contender in each panel, and write the digest of all points into the file."""
    from matplotlib import pyplot

    shown = drawn(runs)
    names = list(dict.fromkeys(name for lines in shown.values() for name in lines))
    figure, panels = pyplot.subplots(1, len(shown), figsize=(4 + 3.5 * len(shown), 4), sharey=True, squeeze=False)
    for axes, (label, lines) in zip(panels[0], shown.items(), strict=True):
        for name, line in lines.items():
            number = names.index(name)
            places, means, halves = zip(*line, strict=True)
            shifted = [place * 1.02**number for place in places]  # intervals must not hide each other
            axes.errorbar(shifted, means, yerr=halves, fmt="o-", capsize=3, label=name, color=color_of(number))
        axes.axhline(0.0, color="black", linewidth=0.8)
        axes.set(xscale="log", xlabel=label)
        axes.set_yscale("symlog", linthresh=2.0)
        axes.set_yticks(TICKS, [f"{tick:+g}" if tick else "0" for tick in TICKS])
        places = sorted({place for line in lines.values() for place, _, _ in line})
        axes.set_xticks(places, [f"{place:,.0f}" for place in places])
        axes.minorticks_off()
    panels[0][0].set_ylabel("increase of the loss, %")
    if names:
        labels = {line.get_label(): line for axes in panels[0] for line in axes.containers}
        panels[0][-1].legend(labels.values(), labels.keys(), fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    saved(figure, file, flat(shown))


# The picture: excess loss during the training of the smallest model.


def curves(run: Run) -> dict[str, list[tuple[float, float, float]]]:
    """Return the points of each contender and number of workers, such as "updates 4": those of ``PANELS``.

    A point is tokens, the excess in %, and half of its interval: of several seeds, the largest batch and dense's rate.
    """
    cells = of_largest_batch(usual_of(run))
    dense = {row["seed"]: row["curve"] for cell in cells if cell.first["contender"] == DENSE for row in cell.rows}
    found = {}
    for cell in cells:
        name, workers = cell.first["contender"], cell.first["workers"]
        if name == DENSE or workers not in PANELS or len(cell.rows) < 2:
            continue
        line = []
        for number, (tokens, _) in enumerate(cell.first["curve"]):
            losses = [row["curve"][number][1] for row in cell.rows]
            excess = mean_interval(excess_percent(losses, [dense[row["seed"]][number][1] for row in cell.rows]))
            line.append((float(tokens), excess.mean, excess.half or 0.0))
        found[f"{name} {workers}"] = line
    return found


def draw_curves(run: Run, file: Path) -> None:
    """Draw a panel for each number of workers, with a band for each interval."""
    from matplotlib import pyplot

    points = curves(run)
    names = list(dict.fromkeys(label.rpartition(" ")[0] for label in points))
    figure, panels = pyplot.subplots(1, len(PANELS), figsize=(11, 4), sharey=True)
    for axes, workers in zip(panels, PANELS, strict=True):
        for number, name in enumerate(names):
            if f"{name} {workers}" not in points:
                continue
            tokens, means, halves = zip(*points[f"{name} {workers}"], strict=True)
            below = [mean - half for mean, half in zip(means, halves, strict=True)]
            above = [mean + half for mean, half in zip(means, halves, strict=True)]
            millions, color = [count / 1e6 for count in tokens], color_of(number)
            axes.plot(millions, means, label=name, color=color)
            axes.fill_between(millions, below, above, color=color, alpha=0.12, linewidth=0)
        axes.axhline(0.0, color="black", linewidth=0.8)
        axes.set(xlabel="million tokens", title=f"{workers} workers")
        axes.set_yscale("symlog", linthresh=2.0)
        axes.set_yticks(TICKS, [f"{tick:+g}" if tick else "0" for tick in TICKS])
    panels[0].set_ylabel("increase of the loss, %")
    lines = {line.get_label(): line for axes in panels for line in axes.get_lines() if line.get_label() in names}
    panels[-1].legend(lines.values(), lines.keys(), fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    saved(figure, file, points)


def color_of(number: int) -> str:
    """Return the color of a contender other than dense, which is black."""
    return COLORS[1 + number % (len(COLORS) - 1)]


def saved(figure: Any, file: Path, points: Mapping[str, Any]) -> None:
    """Write a figure with the digest of its points, and close it."""
    import matplotlib
    from matplotlib import pyplot

    figure.tight_layout()
    with matplotlib.rc_context({"svg.hashsalt": "evidence"}):
        figure.savefig(file, metadata={"Date": None, "Description": digest_of(points)})
    pyplot.close(figure)


def written_page(page: str, runs: Mapping[str, Run]) -> str:
    """Return a page with its generated part made again."""
    before, _, rest = page.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return f"{before}{MARKS[0]}\n{figures(runs)}\n{MARKS[1]}{after}"


def write_page() -> None:
    """Write the page's figures and its picture."""
    runs = recorded()
    PAGE.write_text(written_page(PAGE.read_text(encoding="utf-8"), runs), encoding="utf-8")
    draw(runs, LADDER)
    if runs:
        draw_curves(next(iter(runs.values())), CURVES)
