# SPDX-License-Identifier: Apache-2.0
"""Compare runs: a row of figures for every setting, with the median and the range over its seeds."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from reporting.logs import Run


@dataclass(frozen=True)
class Spread:
    """Hold the median and the range of a figure over runs; infinite where a run has none."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """Hold what the runs of one setting, which differ by their seeds alone, have measured."""

    runs: list[str]  # their names
    job: str
    compression: str
    density: float | None  # elements sent / elements; None where no elements are chosen
    other: dict[str, object]  # the settings in which it differs from other rows of its job
    workers: int
    metric: str
    unit: str  # of samples
    best: Spread  # of the metric
    train_seconds: Spread  # of training steps, to the target, here and below; of all where there is none
    wall_seconds: Spread  # of everything, to the target
    steps: Spread  # to the target
    megabytes: Spread  # 10^6 bytes that have left a worker, to the target
    times_dense: float  # the dense row's seconds of training to the target / this one's; infinite where one has none
    samples_per_second: Spread  # over all workers
    exposed_ms: Spread  # milliseconds a step that backward does not hide
    replicas_equal: bool | None  # None: some run has no end


def rows(runs: Sequence[Run], target: float | None = None, dense: str | None = None) -> list[Row]:
    """Return a row for every setting, in the order of its first run.

    target: of the metric; None: what each run was told. dense: the name of the run that others are compared with; None:
    that of the same job and workers without compression. Raises ``ValueError`` if no run has that name.
    """
    if dense is not None and dense not in [run.name for run in runs]:
        raise ValueError(f"--dense {dense}: there is no such run, but {', '.join(run.name for run in runs)}")
    groups = grouped(runs)
    return [_row(group, runs, target, _base(group, groups, dense)) for group in groups]


def grouped(runs: Iterable[Run]) -> list[list[Run]]:
    """Return the runs of each setting together."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        setting = json.dumps([run.compression, run.density, run.settings], sort_keys=True, default=str)
        found.setdefault(setting, []).append(run)
    return list(found.values())


def differing(run: Run, runs: Iterable[Run]) -> dict[str, object]:
    """Return the settings that ``run`` has and some run of the same job has not, but for those with a column."""
    others = [other.settings for other in runs if other.start["job"] == run.start["job"]]
    return {
        key: value
        for key, value in run.settings.items()
        if key not in ("compression", "density", "workers") and any(other.get(key) != value for other in others)
    }


def spread(values: Sequence[float]) -> Spread:
    """Return median and range; infinite without values."""
    return Spread(statistics.median(values), min(values), max(values)) if values else Spread(*[math.inf] * 3)


def _base(group: Sequence[Run], groups: Sequence[list[Run]], dense: str | None) -> Sequence[Run]:
    """Return the runs that those of ``group`` are compared with; of several, those that are most like them; or none."""

    def alike(other: Sequence[Run]) -> int:
        return sum(other[0].settings.get(key) == value for key, value in group[0].settings.items())

    if dense is not None:
        return next(other for other in groups if dense in [run.name for run in other])
    size = [group[0].start[key] for key in ("job", "workers")]
    candidates = [
        other for other in groups if other[0].is_dense() and [other[0].start[key] for key in ("job", "workers")] == size
    ]
    return max(candidates, key=alike, default=[])


def _to_target(group: Iterable[Run], target: float | None, name: str) -> Spread:
    """Return a figure of a point, where each run reached the target; of its last one where there is no target."""
    points = [run.judged(target) for run in group]
    return spread([math.inf if point is None else getattr(point, name) for point in points])


def _row(group: Sequence[Run], runs: Sequence[Run], target: float | None, base: Sequence[Run]) -> Row:
    first, ends = group[0], [run.end and run.end["replicas_equal"] for run in group]
    seconds, sent = (_to_target(group, target, name) for name in ("train_seconds", "link_bytes"))
    dense_seconds = _to_target(base, target, "train_seconds").median
    comparable = math.isfinite(dense_seconds) and 0 < seconds.median < math.inf
    if target is None and any(run.start["settings"].get("target") is None for run in (*group, *base)):
        comparable &= _to_target(group, None, "step") == _to_target(base, None, "step")  # else one trained longer
    return Row(
        runs=[run.name for run in group],
        job=first.start["job"],
        compression=first.compression,
        density=first.density,
        other=differing(first, runs),
        workers=first.start["workers"],
        metric=first.metric,
        unit=first.start["unit"],
        best=spread([best for run in group if (best := run.best()) is not None]),
        train_seconds=seconds,
        wall_seconds=_to_target(group, target, "wall_seconds"),
        steps=_to_target(group, target, "step"),
        megabytes=Spread(sent.median / 1e6, sent.low / 1e6, sent.high / 1e6),
        times_dense=dense_seconds / seconds.median if comparable else math.inf,
        samples_per_second=spread([rate for run in group if (rate := run.samples_per_second()) is not None]),
        exposed_ms=spread([time for run in group if (time := run.exposed_ms()) is not None]),
        replicas_equal=False if False in ends else None if None in ends else True,
    )
