# SPDX-License-Identifier: Apache-2.0
"""Show how a training goes on, and write it down: progress bars, TensorBoard, and a log of JSON lines."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.progress import Curves, bar

SECONDS = 5.0  # between two lines of progress, where there is no terminal
SPEEDS = ("samples_per_second", "train_seconds", "wall_seconds")


class Silent:
    """Do nothing: what workers other than the first have for a tracker."""

    def begin(self, epoch: int, steps: int, done: int) -> None:
        """Begin an epoch."""

    def advance(self, figures: Mapping[str, float]) -> None:
        """Note that a step was made."""

    def write(self, kind: str, **fields: Any) -> None:
        """Add a line to the log."""

    def close(self) -> None:
        """End."""


class Tracker(Silent):
    """Track the training of all workers from the first of them.

    The log is ``FOLDER/log.jsonl``, to which lines are added; TensorBoard's events lie beside it. A line is an object
    with ``"kind"``: ``start``, ``plan``, ``epoch``, ``target`` or ``end`` (examples/README.md lists their fields).
    """

    def __init__(self, folder: Path, epochs: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = (folder / "log.jsonl").open("a+b")
        if self._log.tell():
            self._log.seek(-1, os.SEEK_END)
            if self._log.read(1) != b"\n":  # a run was killed as it wrote
                self._log.write(b"\n")
        self._curves = Curves(folder)
        self._epochs = f"{epochs:g}"
        self._bar: Any = None  # of tqdm, while an epoch runs
        self._told = 0.0  # when the last line of progress was printed

    def begin(self, epoch: int, steps: int, done: int) -> None:
        """Begin an epoch (the first is 1) of so many ``steps``, of which some are ``done``."""
        self._end_bar()
        head = f"epoch {epoch}/{self._epochs}"
        self._bar = bar(head, steps=steps, done=done)
        self._head, self._steps, self._done, self._told = head, steps, done, time.monotonic()

    def advance(self, figures: Mapping[str, float]) -> None:
        """Move the bar by a step, or print a line now and then where stderr is no terminal."""
        assert self._bar is not None
        self._done += 1
        now = time.monotonic()
        if not self._bar.disable:
            self._bar.set_postfix_str(shown(figures), refresh=False)
            self._bar.update()
        elif now - self._told >= SECONDS:
            self._told = now
            print(f"{self._head}  step {self._done}/{self._steps}  {shown(figures)}", file=sys.stderr, flush=True)

    def write(self, kind: str, **fields: Any) -> None:
        """Add a line to the log; an epoch's figures go to TensorBoard and to stderr, too."""
        self._log.write(json.dumps({"kind": kind, **fields}, default=str).encode() + b"\n")
        self._log.flush()
        if kind == "epoch":
            self._end_bar()
            self._curves.add(fields["step"], scalars(fields))
            measured = {f"test {name}": value for name, value in fields["metrics"].items()}
            figures = {"loss": fields["loss"], **measured, "samples/s": fields["samples_per_second"]}
            line = f"epoch {fields['epoch']:g}/{self._epochs}  step {fields['step']}  {shown(figures)}"
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Close the files."""
        self._end_bar()
        self._curves.close()
        self._log.close()

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def shown(figures: Mapping[str, float]) -> str:
    """Return figures in one line, with four digits."""
    return "  ".join(f"{name} {value:.4g}" for name, value in figures.items())


def scalars(fields: Mapping[str, Any]) -> dict[str, float]:
    """Return what an epoch's line has for TensorBoard, by tag."""
    stats = fields["stats"]
    return {
        "train/loss": fields["loss"],
        "train/lr": fields["lr"],
        **{f"val/{name}": value for name, value in fields["metrics"].items()},
        **{f"speed/{name}": fields[name] for name in SPEEDS},
        "speed/exposed_seconds": stats["exposed_seconds"],
        "bytes/sent": stats["bytes_sent"],
        "bytes/dense": stats["bytes_dense"],
        "bytes/link": stats["link_bytes"],
        "bytes/link_dense": stats["link_bytes_dense"],
        "density": stats["density"],
        "residual_norm": stats["residual_norm"],
        **{f"selection/{name}": value for name, value in stats.get("selection", {}).items()},
    }
