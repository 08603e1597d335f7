# SPDX-License-Identifier: Apache-2.0
"""Train a task: accumulate, clip, step, evaluate, and keep count, so that a checkpoint can go on at any step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from jobs.base import Task
from jobs.schedules import Scheduler
from replicas import averaged_buffers
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import agmerge
from training.optimizers import Wrapped

# Totals of stats().
COUNTED = ("bytes_sent", "bytes_dense", "link_bytes", "link_bytes_dense", "elements_sent", "exposed_seconds")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Way:
    """Hold how to train, beside the task and its optimizer."""

    passes: int = 1  # backward passes a step
    clip: float | None = None  # the largest norm of the gradients of a step
    amp: str | None = None  # "bf16" or "fp16": what autocast computes with
    updates: bool = False  # whether workers exchange what their optimizers did
    uneven: bool = False  # whether workers may have unequally many batches


@dataclass
class Progress:
    """Count what was done, over all runs that went on from one another."""

    epoch: int = 0  # epochs ended
    place: int = 0  # backward passes made in the epoch that runs
    step: int = 0  # steps of the optimizer
    loss: float = 0.0  # the sum over the passes of this epoch, on this worker
    train_seconds: float = 0.0  # in steps
    wall_seconds: float = 0.0  # of the clock, up to the last checkpoint
    counted: dict[str, float] = field(default_factory=dict)  # COUNTED, up to the last checkpoint
    best: float | None = None  # the metric's best value
    reached: bool = False  # whether that was the target


class Loop:
    """Train ``task`` with a wrapped ``optimizer`` and its ``schedule``."""

    def __init__(
        self,
        task: Task,
        optimizer: Wrapped,
        schedule: Scheduler,
        way: Way,
        scaler: torch.amp.GradScaler,  # one that is not enabled changes nothing
        device: torch.device,
        highest: list[float],
    ) -> None:
        self.task, self.optimizer, self.schedule = task, optimizer, schedule
        self.way, self.scaler, self.device = way, scaler, device
        self.progress = Progress()
        self.highest = highest  # rates, by parameter group
        self.seconds: list[float] = []  # of each step of this run

    @property
    def samples(self) -> int:
        """Return how many samples all workers train with in a step."""
        return self.task.samples * self.way.passes * agmerge.size()

    def steps(self) -> int:
        """Return how many steps this worker makes in the epoch that runs; passes that are left over are left out."""
        return self.task.passes(self.progress.epoch) // self.way.passes

    def epoch(self, ended: Callable[[], bool]) -> Iterator[float]:
        """Collective. Train to the end of the epoch, or until ``ended()``, asked before steps; yield their losses."""
        now, passes = self.progress, self.way.passes
        batches = self.task.batches(now.epoch, now.place)
        last = self.steps() * passes
        self.task.model.train()
        while now.place < last and not ended():
            loss = self._step(list(islice(batches, passes)))
            now.place, now.step, now.loss = now.place + passes, now.step + 1, now.loss + loss
            yield loss / passes
        if self.way.uneven:  # also where it was ended early: the others may still be at it
            self.optimizer.join()
            steps = int(agmerge.allreduce(torch.tensor(now.step), op=agmerge.Max))
            self.advance(steps - now.step)
            now.step = steps

    def _step(self, batches: list[Any]) -> float:
        """Collective. Make one step with the mean of the gradients of ``batches``; return the sum of their losses."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        for batch in batches:
            dtype = DTYPES.get(self.way.amp or "")
            with torch.autocast(self.device.type, dtype) if dtype else nullcontext():
                loss = self.task.loss(batch)
            self.scaler.scale(loss / len(batches)).backward()
            total += loss.detach()
        self._clip_and_step()
        self.advance(1)
        self.seconds.append(time.perf_counter() - start)
        self.progress.train_seconds += self.seconds[-1]
        return total.item()

    def _clip_and_step(self) -> None:
        """Collective. Bound the norm of the gradients, and step: of each worker's own, or of what was combined."""
        if self.way.clip is None:
            self.scaler.step(self.optimizer)
        elif self.way.updates:  # gradients are this worker's own, as in a script without agmerge
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.task.model.parameters(), self.way.clip)
            self.scaler.step(self.optimizer)
        else:
            self.optimizer.synchronize()
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.task.model.parameters(), self.way.clip)
            with self.optimizer.skip_synchronize():
                self.scaler.step(self.optimizer)
        self.scaler.update()

    def advance(self, steps: int) -> None:
        """Move the schedule on, if it goes by steps."""
        if not isinstance(self.schedule, ReduceLROnPlateau):
            for _ in range(steps):
                self.schedule.step()

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Collective. Return the metrics of what all workers share; each looks at its part of what is held out."""
        # With sync="updates" the model's own parameters are ahead of the shared ones.
        with averaged_buffers(self.task.model), self.optimizer.shared():
            self.task.model.eval()
            sums = self.task.evaluate()
            self.task.model.train()
        names = sorted(sums)
        row = torch.stack([torch.as_tensor(sums[name]).double().cpu() for name in names])
        return self.task.figures(dict(zip(names, agmerge.allreduce(row, op=agmerge.Sum).tolist(), strict=True)))

    def mean_loss(self) -> float:
        """Collective. Return the mean loss of the passes of this epoch so far, over all workers."""
        row = torch.tensor([self.progress.loss, float(self.progress.place)], dtype=torch.float64)
        loss, passes = agmerge.allreduce(row, op=agmerge.Sum).tolist()
        return loss / max(passes, 1.0)

    def end_epoch(self, metrics: dict[str, float]) -> None:
        """Count the epoch; a schedule that goes by the metric sees it."""
        if isinstance(self.schedule, ReduceLROnPlateau):
            self.schedule.step(metrics[self.task.metric])
        self.progress.epoch, self.progress.place, self.progress.loss = self.progress.epoch + 1, 0, 0.0

    def stats(self) -> dict[str, Any]:
        """Return the library's figures, totals over all runs that went on from one another."""
        stats = self.optimizer.stats()
        return {**stats, **{name: stats[name] + self.progress.counted.get(name, 0.0) for name in COUNTED}}
