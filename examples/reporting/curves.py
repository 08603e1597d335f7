# SPDX-License-Identifier: Apache-2.0
"""Draw the metric of runs over seconds of training and over epochs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reporting.comparison import differing, grouped
from reporting.logs import Run

SETTINGS = {"svg.hashsalt": "agmerge", "axes.grid": True, "axes.spines.top": False, "axes.spines.right": False}


@dataclass(frozen=True)
class Curve:
    """Hold the metric of one run, after each epoch."""

    job: str
    label: str  # of the setting, the same for all its seeds
    metric: str
    seconds: list[float]  # of training
    epochs: list[float]
    values: list[float]


def curves(runs: Sequence[Run]) -> list[Curve]:
    """Return a curve for every run, seeds of one setting beside each other."""
    return [curve(run, runs) for group in grouped(runs) for run in group]


def curve(run: Run, runs: Sequence[Run]) -> Curve:
    """Return the curve of a run; its label says in what it differs from the other ``runs``."""
    density = [] if run.density is None else [f"{run.density:g}"]
    differences = [f"{key}={value}" for key, value in differing(run, runs).items()]
    label = " ".join([run.compression, *density, f"{run.start['workers']}w", *differences])
    lines = [line for line in run.epochs if run.metric in line["metrics"]]
    return Curve(
        run.start["job"],
        label,
        run.metric,
        [line["train_seconds"] for line in lines],
        [line["epoch"] for line in lines],
        [line["metrics"][run.metric] for line in lines],
    )


def draw(runs: Sequence[Run], path: Path, target: float | None = None) -> None:
    """Write a picture with two panels a job; runs of one setting have one colour. target: a line; None: no line.

    Raises ``ImportError`` without matplotlib, and ``ValueError`` for a file's ending that it does not know.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("--picture needs matplotlib: pip install matplotlib, or '.[pictures]' here") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    found = curves(runs)
    jobs = list(dict.fromkeys(one.job for one in found))
    with matplotlib.rc_context(SETTINGS):
        figure, axes = pyplot.subplots(len(jobs), 2, figsize=(11, 4 * len(jobs)), squeeze=False, layout="constrained")
        for job, (left, right) in zip(jobs, axes, strict=True):
            here = [one for one in found if one.job == job]
            colours = {label: f"C{place}" for place, label in enumerate(dict.fromkeys(one.label for one in here))}
            for axis, x in ((left, "seconds"), (right, "epochs")):
                labelled = set[str]()
                for one in here:
                    label = None if one.label in labelled else one.label
                    axis.plot(getattr(one, x), one.values, color=colours[one.label], marker=".", label=label)
                    labelled.add(one.label)
                if target is not None:
                    axis.axhline(target, color="grey", linestyle="--", linewidth=1)
                axis.set(title=job, xlabel={"seconds": "seconds of training"}.get(x, x), ylabel=here[0].metric)
            right.legend(fontsize="small")
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)
