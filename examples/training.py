"""Run a training from its first step, or its last checkpoint, to its end: epochs, targets, signals, checkpoints."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import resume
from checkpoints import Checkpoints
from jobs.base import LESS_IS_BETTER
from loop import Loop
from stopping import Stopping
from tracking import Silent

import agmerge


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
        self._plan = ""

    def run(self) -> None:
        """Collective. Train, evaluate after every epoch, and keep checkpoints, until one of the ends."""
        now = self.loop.progress
        while not self._over():
            self._epoch()
            whole = now.place >= self.loop.steps() * self.loop.way.passes
            if self.reason == "signal" and not whole:
                self._save()
                return
            self._evaluate()
            if whole:
                self.loop.end_epoch(self.metrics)
            if now.reached and self.ends.at_target:
                self.reason = "target"
            if self.loop.way.uneven and self.stopping.agreed(now.step, 0.0, at_once=True):
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
        loop, now = self.loop, self.loop.progress
        passes = loop.way.passes
        self.tracker.begin(now.epoch + 1, loop.steps(), now.place // passes)
        samples = loop.task.samples * passes * agmerge.size()
        for loss in loop.epoch(self._ended):
            shown = {name: self.metrics[name] for name in (loop.task.metric,) if name in self.metrics}
            self.tracker.advance({"loss": loss, **shown, "samples/s": samples / loop.seconds[-1]})

    def _ended(self) -> bool:
        """Collective. Tell whether the training ends before the next step."""
        now, loop = self.loop.progress, self.loop
        if self.ends.max_steps is not None and now.step >= self.ends.max_steps:
            self.reason = "max-steps"
        elif not loop.way.uneven and self.stopping.agreed(now.step, loop.seconds[-1] if loop.seconds else 1.0):
            self.reason = "signal"
        return bool(self.reason)

    def _evaluate(self) -> None:
        """Collective. Measure, and write the figures down."""
        loop, now, task = self.loop, self.loop.progress, self.loop.task
        loss, self.metrics = loop.mean_loss(), loop.evaluate()
        now.wall_seconds = self._before + time.monotonic() - self._began
        value = self.metrics[task.metric]
        sign = -1 if task.metric in LESS_IS_BETTER else 1
        if now.best is None or sign * value > sign * now.best:
            now.best = value
        stats, done = loop.stats(), now.place / max(1, task.passes(now.epoch))
        samples = task.samples * loop.way.passes * agmerge.size()
        plan = ",".join(map(str, loop.optimizer.plan.counts)) if stats["steps"] else ""
        if plan != self._plan:
            self._plan = plan
            chosen = loop.optimizer.plan
            self.tracker.write(
                "plan", step=now.step, buffers=stats["buffers"], counts=chosen.counts, labels=chosen.labels
            )
        seconds = {"train_seconds": now.train_seconds, "wall_seconds": now.wall_seconds}
        recent = loop.seconds[-loop.steps() :] or [float("nan")]
        self.tracker.write(
            "epoch",
            epoch=now.epoch + (1 if now.place >= loop.steps() * loop.way.passes else round(done, 3)),
            step=now.step,
            loss=loss,
            metrics=self.metrics,
            lr=loop.optimizer.param_groups[0]["lr"],
            **seconds,
            samples_per_second=samples * len(recent) / sum(recent),
            stats=stats,
        )
        if self.ends.target is not None and not now.reached and sign * value >= sign * self.ends.target:
            now.reached = True
            counts = {"epoch": now.epoch + 1, "step": now.step, "bytes_sent": stats["bytes_sent"]}
            self.tracker.write("target", metric=task.metric, target=self.ends.target, value=value, **counts, **seconds)

    def _save(self) -> None:
        """Collective. Keep a checkpoint, if there is a folder for it."""
        self.loop.progress.wall_seconds = self._before + time.monotonic() - self._began
        if self.checkpoints is not None:
            resume.save(self.loop, self.checkpoints, self.about)
