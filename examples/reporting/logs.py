# SPDX-License-Identifier: Apache-2.0
"""Read what runs of ``train.py`` have left in their ``log.jsonl``: one JSON object a line, see ``tracking.py``."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reporting import others

LESS_IS_BETTER = frozenset({"perplexity", "loss"})  # as in jobs/base.py, which needs torch
WITHOUT_DENSITY = frozenset(  # compressors, by the names that the library gives them
    "none fp16 bf16 powersgd acpsgd auto eden-1 eden-2 eden-3 eden-4 int8 int4 fp8 qsgd terngrad onebit".split()
)
NOT_A_SETTING = frozenset(  # flags that say where a run is kept and how far it goes, not what it does
    "run_name log_dir checkpoint_dir portable resume json seed data readers target stop_at_target max_steps".split()
)
REQUIRED = {  # what a report needs of the lines of each kind; other kinds are for others
    "start": ("job", "run", "settings", "optimizer", "metric", "unit", "workers", "step"),
    "epoch": ("epoch", "step", "metrics", "train_seconds", "wall_seconds", "samples_per_second", "stats"),
    "target": ("metric", "value", "epoch", "step", "train_seconds", "wall_seconds", "bytes_sent"),
    "end": ("replicas_equal",),
}


@dataclass(frozen=True)
class Point:
    """Hold how far a run had come, and at which cost."""

    value: float  # of the metric
    epoch: float
    step: int
    train_seconds: float  # of training steps alone
    wall_seconds: float  # of everything
    link_bytes: float  # that have left one worker; NaN in logs from before it was counted


@dataclass(frozen=True)
class Run:
    """Hold what one file says, as of the last attempt where a run was resumed."""

    path: Path
    start: Mapping[str, Any]  # the last line of its kind, as the schema has it
    epochs: Sequence[Mapping[str, Any]]  # lines, by step
    points: Sequence[Point]  # of epochs and of targets reached between them, by step
    end: Mapping[str, Any] | None  # None: it was killed, or is still running
    note: str = ""  # what was wrong with the file, though it could be read

    @property
    def name(self) -> str:
        """Return the name that the run was given."""
        return str(self.start["run"])

    @property
    def metric(self) -> str:
        """Return the metric that the job is about."""
        return str(self.start["metric"])

    @property
    def compression(self) -> str:
        """Return the library's name for what compresses."""
        return str(self.start["optimizer"].get("compression", "none"))

    @property
    def density(self) -> float | None:
        """Return elements sent / elements; None where there is no choice of elements."""
        density = self.start["optimizer"].get("density")
        return None if density is None or self.compression in WITHOUT_DENSITY else float(density)

    def is_dense(self) -> bool:
        """Tell whether all gradients are sent as they are, which others are compared with."""
        return self.compression == "none" and self.start["optimizer"].get("sync", "gradients") == "gradients"

    @property
    def settings(self) -> dict[str, Any]:
        """Return what decides how the run goes, but for its seed: flags, workers, launcher and backend."""
        found = {key: value for key, value in self.start["settings"].items() if key not in NOT_A_SETTING}
        return found | {key: self.start.get(key) for key in ("job", "workers", "launcher", "backend")}

    def best(self) -> float | None:
        """Return the best value of the metric; None before the first epoch."""
        values = [point.value for point in self.points if point.value == point.value]  # but NaN
        return (min if self.metric in LESS_IS_BETTER else max)(values, default=None)

    def samples_per_second(self) -> float | None:
        """Return the median over epochs, of all workers together; None before the first one."""
        rates = [line["samples_per_second"] for line in self.epochs if "samples_per_second" in line]
        return statistics.median(rates) if rates else None

    def exposed_ms(self) -> float | None:
        """Return the milliseconds of communication a step that backward does not hide; None where it is not known."""
        last = self.epochs[-1] if self.epochs else {"step": 0, "stats": {}}
        seconds = last["stats"].get("exposed_seconds")
        return None if seconds is None or not last["step"] else 1000 * seconds / last["step"]

    def reached(self, target: float | None) -> Point | None:
        """Return the first point at ``target`` or beyond; None if there is none. ``target`` None: the run's own."""
        target = self.start["settings"].get("target") if target is None else target
        if target is None:
            return None
        less = self.metric in LESS_IS_BETTER
        return next((one for one in self.points if (one.value <= target if less else one.value >= target)), None)

    def judged(self, target: float | None) -> Point | None:
        """Return the point that figures are of: the first one at the target, the last one where there is none."""
        if target is None and self.start["settings"].get("target") is None:
            return self.points[-1] if self.points else None
        return self.reached(target)


def read(path: Path, metric: str = "loss") -> Run:
    """Return the run of a file; ``metric``: of a log of another script than ``train.py``.

    A line that was cut off, when a run was killed, is left out, and ``note`` says so.

    Raises ``ValueError`` with file and line for one that is broken or has no start, ``FileNotFoundError`` for none.
    """
    text = path.read_text(encoding="utf-8")
    foreign = others.lines(path, text, metric)
    lines, note = _lines(path, text) if foreign is None else (foreign, "")
    if not lines or lines[0]["kind"] != "start":
        raise ValueError(f"{path}:1: a log begins with a line of kind 'start'; is this one of train.py?")
    start, end = lines[0], None
    kept: list[Mapping[str, Any]] = []
    for line in lines:
        if line["kind"] == "start":  # what an earlier attempt did after this step is done again
            start, end = line, None
            kept = [one for one in kept if one["step"] <= line["step"]]
        elif line["kind"] == "end":
            end = line
        elif line["kind"] == "epoch" or (line["kind"] == "target" and line["metric"] == start["metric"]):
            kept.append(line)
    points = sorted((_point(line, start["metric"]) for line in kept), key=lambda point: point.step)
    return Run(path, start, [line for line in kept if line["kind"] == "epoch"], points, end, note)


def _lines(path: Path, text: str) -> tuple[list[dict[str, Any]], str]:
    """Return the objects of a file, each with what :data:`REQUIRED` says, and a note on what was left out."""
    found: list[dict[str, Any]] = []
    texts = text.splitlines()
    cut = ""
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            # A run that is killed leaves half a line, which is the last one, or the last before it was resumed.
            if number < len(texts) and '"start"' not in texts[number]:
                raise ValueError(f"{path}:{number}: no JSON object ({error}); was the file edited?") from error
            cut = f"{path}:{number}: left out, this line was cut off"
            continue
        kind = line.get("kind") if isinstance(line, dict) else None
        missing = {"kind", *REQUIRED.get(str(kind), ())} - set(line if isinstance(line, dict) else ())
        if missing:
            raise ValueError(f"{path}:{number}: a line of kind {kind!r} without {', '.join(sorted(missing))}")
        found.append(line)
    return found, cut


def _point(line: Mapping[str, Any], metric: str) -> Point:
    """Return what a line of kind "epoch" or "target" says of ``metric``; NaN if it does not."""
    at_epoch = line["kind"] == "epoch"
    value = line["metrics"].get(metric, math.nan) if at_epoch else line["value"]
    sent = (line["stats"] if at_epoch else line).get("link_bytes", math.nan)
    return Point(value, line["epoch"], line["step"], line["train_seconds"], line["wall_seconds"], sent)
