# SPDX-License-Identifier: Apache-2.0
"""Run a training from its first step, or its last checkpoint, to its end: epochs, targets, signals, checkpoints."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from jobs.base import LESS_IS_BETTER

import agmerge
import merging
from training import resume
from training.checkpoints import Checkpoints
from training.loop import Loop
from training.stopping import Stopping
from training.tracking import Silent


@dataclass(frozen=True)
class Ends:
    """Hold when a training ends."""

    epochs: int
    max_steps: int | None = None
    target: float | None = None  # of the task's metric
    at_target: bool = False  # whether to end there


class Training:
    """Take a loop through its epochs."""

    def __init__(
        self,
        loop: Loop,
        ends: Ends,
        tracker: Silent,
        stopping: Stopping,
        checkpoints: Checkpoints | None,
        about: dict[str, Any],  # goes into checkpoints, and is equal on all workers
    ) -> None:
        self.loop, self.ends, self.tracker, self.stopping = loop, ends, tracker, stopping
        self.checkpoints, self.about = checkpoints, about
        self.metrics: dict[str, float] = {}  # of the last evaluation
        self.reason = ""  # why it ended: "done", "target", "max-steps" or "signal"
        self._began = time.monotonic()
        self._before = loop.progress.wall_seconds
        self._plan: merging.Plan | None = None  # the last one that was written down
        self._sign = -1 if loop.task.metric in LESS_IS_BETTER else 1

    def run(self) -> None:
        """Collective. Train, evaluate after every epoch, and keep checkpoints, until one of the ends."""
        now = self.loop.progress
        while not self._over():
            self._epoch()
            whole = self._whole()
            if self.reason == "signal" and not whole:  # there may be little time left
                self._save()
                return
            self._evaluate(whole)
            if whole:
                self.loop.end_epoch(self.metrics)
            if now.reached and self.ends.at_target:
                self.reason = "target"
            elif self.loop.way.uneven and self.stopping.agreed(now.step, 0.0, at_once=True):
                self.reason = "signal"
            self._save()
            if self.reason:
                return
        if not self.metrics:  # it went on from its end
            self.metrics = self.loop.evaluate()

    def _over(self) -> bool:
        now = self.loop.progress
        if now.epoch >= self.ends.epochs:
            self.reason = "done"
        elif self.ends.max_steps is not None and now.step >= self.ends.max_steps:
            self.reason = "max-steps"
        elif now.reached and self.ends.at_target:
            self.reason = "target"
        return bool(self.reason)

    def _epoch(self) -> None:
        """Collective. Train to the end of the epoch, or of the training."""
        loop, now, metric = self.loop, self.loop.progress, self.loop.task.metric
        self.tracker.begin(now.epoch + 1, loop.steps(), now.place // loop.way.passes)
        for loss in loop.epoch(self._ended):
            last = {metric: self.metrics[metric]} if self.metrics else {}
            self.tracker.advance({"loss": loss, **last, "samples/s": loop.samples / loop.seconds[-1]})

    def _ended(self) -> bool:
        """Collective. Tell whether the training ends before the next step."""
        now, loop = self.loop.progress, self.loop
        if self.ends.max_steps is not None and now.step >= self.ends.max_steps:
            self.reason = "max-steps"
        elif not loop.way.uneven and self.stopping.agreed(now.step, loop.seconds[-1] if loop.seconds else 1.0):
            self.reason = "signal"
        return bool(self.reason)

    def _whole(self) -> bool:
        """Collective. Tell whether all workers have come to the end of the epoch."""
        loop = self.loop
        whole = torch.tensor(int(loop.progress.place >= loop.steps() * loop.way.passes))
        return bool(agmerge.allreduce(whole, op=agmerge.Min)) if loop.way.uneven else bool(whole)

    def _evaluate(self, whole: bool) -> None:
        """Collective. Measure, and write the figures down; ``whole``: at the end of an epoch."""
        loop, now = self.loop, self.loop.progress
        loss, self.metrics = loop.mean_loss(), loop.evaluate()
        self._count_seconds()
        stats, epoch = loop.stats(), now.epoch + 1.0
        if not whole:
            epoch = now.epoch + round(now.place / max(1, loop.task.passes(now.epoch)), 3)
        counts = {"epoch": epoch, "step": now.step}
        seconds = {"train_seconds": now.train_seconds, "wall_seconds": now.wall_seconds}
        self._write_plan()
        recent = loop.seconds[-loop.steps() :]
        self.tracker.write(
            "epoch",
            **counts,
            loss=loss,
            metrics=self.metrics,
            lr=loop.optimizer.param_groups[0]["lr"],
            **seconds,
            samples_per_second=loop.samples * len(recent) / sum(recent) if recent else 0.0,
            stats=stats,
        )
        if self._is_best(self.metrics[loop.task.metric]) and self._reaches_target():
            now.reached = True
            about = {"metric": loop.task.metric, "target": self.ends.target, "value": now.best}
            sent = {name: stats[name] for name in ("bytes_sent", "link_bytes")}
            self.tracker.write("target", **about, **counts, **seconds, **sent)

    def _is_best(self, value: float) -> bool:
        """Keep the metric if it is better than ever; tell whether it is."""
        now = self.loop.progress
        better = now.best is None or self._sign * value > self._sign * now.best
        if better:
            now.best = value
        return better

    def _reaches_target(self) -> bool:
        """Tell whether the best metric is as good as the target, for the first time."""
        now, target = self.loop.progress, self.ends.target
        if now.best is None or target is None or now.reached:
            return False
        return self._sign * now.best >= self._sign * target

    def _write_plan(self) -> None:
        """Write the plan down, if it is another one than before."""
        optimizer = self.loop.optimizer
        plan = optimizer.plan if optimizer.stats()["exchanges"] else None
        if plan is not None and plan != self._plan:
            self._plan = plan
            buffers = len(plan.counts)
            self.tracker.write(
                "plan", step=self.loop.progress.step, buffers=buffers, counts=plan.counts, labels=plan.labels
            )

    def _count_seconds(self) -> None:
        self.loop.progress.wall_seconds = self._before + time.monotonic() - self._began

    def _save(self) -> None:
        """Collective. Keep a checkpoint, if there is a folder for it."""
        self._count_seconds()
        if self.checkpoints is not None:
            resume.save(self.loop, self.checkpoints, self.about)
