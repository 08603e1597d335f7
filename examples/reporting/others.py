# SPDX-License-Identifier: Apache-2.0
"""Read logs of other scripts: a JSON object a line with a step and figures, or a Trainer's ``trainer_state.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SECONDS = ("train_seconds", "seconds", "time", "elapsed", "_runtime")  # since the start, the first that a line has
BYTES = ("link_bytes", "agmerge/bytes_sent", "bytes_sent")  # that have left a worker, since the start
STEPS = ("step", "global_step", "iter", "iteration", "_step")


def lines(path: Path, text: str, metric: str) -> list[dict[str, Any]] | None:
    """Return a start and epochs, in the form of a log of ``train.py``, of the text of a file; None: it is such a log.

    Raises ``ValueError`` where no line has a step and ``metric``.
    """
    found = _objects(text)
    if not found or "kind" in found[0]:
        return None
    told: dict[str, Any] = {}
    epochs = []
    for line in found:
        told |= {key: line[key] for key in ("compression", "density", "workers") if key in line}
        step = _first(line, STEPS)
        if step is None or not isinstance(line.get(metric), (int, float)):
            continue
        seconds, sent = _first(line, SECONDS), _first(line, BYTES)
        spent = float("nan") if seconds is None else seconds
        epochs.append(
            {
                "kind": "epoch", "epoch": line.get("epoch", step), "step": int(step), "metrics": {metric: line[metric]},
                "train_seconds": spent, "wall_seconds": spent, "stats": {} if sent is None else {"link_bytes": sent},
            }
        )  # fmt: skip
    if not epochs:
        names = sorted({key for line in found for key in line})
        raise ValueError(f"{path}: no line has a step and {metric!r}; --metric takes one of {', '.join(names)}")
    name = path.parent.name or path.stem
    compression = str(told.get("compression", name))
    start = {
        "kind": "start", "job": "log", "run": name, "settings": {"compression": compression}, "metric": metric,
        "optimizer": {"compression": compression, "density": told.get("density")}, "unit": "", "step": 0,
        "workers": told.get("workers", 1),
    }  # fmt: skip
    return [start, *epochs]


def _objects(text: str) -> list[Mapping[str, Any]]:
    """Return the objects of a file: of a list that is one, of a Trainer's state, or one a line."""
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
        whole = None
    if isinstance(whole, dict) and isinstance(whole.get("log_history"), list):
        return [line for line in whole["log_history"] if isinstance(line, dict)]
    if isinstance(whole, list):
        return [line for line in whole if isinstance(line, dict)]
    found = []
    for line in text.splitlines():
        try:
            one = json.loads(line)
        except json.JSONDecodeError:
            continue  # cut off, where a run was killed, or a line that is no figure
        if isinstance(one, dict):
            found.append(one)
    return found


def _first(line: Mapping[str, Any], names: Sequence[str]) -> float | None:
    """Return the first of these figures that a line has."""
    return next((line[name] for name in names if isinstance(line.get(name), (int, float))), None)
