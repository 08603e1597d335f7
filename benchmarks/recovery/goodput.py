# SPDX-License-Identifier: Apache-2.0
"""Goodput of a job of which a worker is killed, by the clock, every so many seconds, and replaced at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from recovery.contenders import WORKERS, Contender
from recovery.turn import AFTER, Line, Turn, timeline


def pace(lines: Sequence[Line]) -> float:
    """Return the mean seconds of a step of the worker that wrote the first line, from its first line to its last.

    The mean, not the median: an uninterrupted run has slow steps, and writes files, too.
    """
    of_one = [line for line in lines if line.pid == lines[0].pid]
    return (of_one[-1].time - of_one[0].time) / (of_one[-1].step - of_one[0].step)


def newcomers(lines: Sequence[Line], since: float) -> dict[int, float]:
    """Return when each worker finished its first step, of those that had finished none until ``since``."""
    first: dict[int, float] = {}
    for line in lines:
        first.setdefault(line.pid, line.time)
    return {pid: at for pid, at in first.items() if at > since}


def goodput(lines: Sequence[Line], began: float, kills: Sequence[float], paces: Mapping[int, float]) -> dict[str, Any]:
    """Return the steps gained over those that the workers present would have made without an interruption.

    ``lines``: of all workers, by time, from the start of the job; what is looked at goes from the first line at or
    after ``began`` to the last. ``kills``: when a worker was killed, each after the replacement of the one before had
    come. ``paces``: seconds a step of an uninterrupted run, by number of workers.

    "gained": the training's step at the end less that at the beginning, so what is lost and made again counts once.
    "fewer": seconds from each kill to the first step that a replacement has finished, together; then a worker is away.
    "possible" = (seconds - fewer) / pace of all + fewer / pace of one less. Without a pace of one less (who starts all
    again has no such steps) the pace of all holds throughout. "goodput" = gained / possible, 0 where nothing is gained.
    "paused": seconds without a finished step, beyond one of all, wherever these are more than two.
    """
    window = [line for line in lines if line.time >= began]
    first, last, whole = window[0], window[-1], paces[WORKERS]
    gained, seconds = last.step - first.step, last.time - first.time
    fewer = sum(min(newcomers(lines, kill).values(), default=last.time) - kill for kill in kills)
    possible = (seconds - fewer) / whole + fewer / paces.get(WORKERS - 1, whole)
    gaps = [after.time - before.time for before, after in pairwise(window)]
    paused = sum(gap - whole for gap in gaps if gap > 2 * whole)
    found = {"gained": gained, "possible": possible, "seconds": seconds, "fewer": fewer, "paused": paused}
    return {**found, "goodput": max(gained, 0) / possible}


class ClockTurn(Turn):
    """Turn in which a worker is killed each time so many seconds have gone by."""

    def __init__(self, job: Contender, patience: float, seed: int, every: float) -> None:
        super().__init__(job, patience, seed)
        self.every = every
        self.present: set[int] = set()
        self.kills: list[float] = []
        self.skipped = 0  # the replacement of the one before had not come
        self.found: dict[str, Any] = {}

    def away(self, steps: int) -> float:
        """Return the pace while a worker is away: none that starts takes part of the cores. Then replace it."""
        victim, killed = self.strike(self.present)
        time.sleep(self.every)
        lines = self.wait(WORKERS - 1, steps + 2, killed)  # a survivor may have ended a step of all after the kill
        came = time.monotonic()
        self.job.replace()
        self.wait(WORKERS, AFTER, came)
        self.present = (self.present - {victim}) | newcomers(timeline(self.job.folder), came).keys()
        return pace([line for line in lines if line.workers < WORKERS])

    def arrived(self) -> bool:
        """Return whether the last one killed has been replaced, and note who is present."""
        if not self.kills:
            return True
        new = list(newcomers(timeline(self.job.folder), self.kills[-1]))
        if len(new) < (WORKERS if self.job.replaces else 1):
            return False
        # Where all are started again, those of an attempt in between may have ended by themselves.
        self.present = set(new[-WORKERS:]) if self.job.replaces else self.present.union(new)
        return True

    def tick(self) -> None:
        """Kill a worker, and start its replacement at once, as a supervisor does; or skip that."""
        if self.job.ended(self.killed):
            raise ChildProcessError("a process that nobody has killed has ended")
        if not self.arrived():
            self.skipped += 1
            return
        victim, killed = self.strike(self.present)
        self.present.remove(victim)
        self.kills.append(killed)
        if not self.job.replaces:
            self.job.replace()

    def measure(self, steps: int, ticks: int) -> None:
        """Measure paces, then kill at the beginning of each of ``ticks`` intervals, and all workers' pace once more."""
        lines = self.usual_steps(steps, self.every)
        self.present = {line.pid for line in lines}
        whole = [pace(lines)]
        paces = {} if self.job.replaces else {WORKERS - 1: self.away(steps)}
        began = self.wait(1, 1, time.monotonic())[0].time  # a step has just been finished
        for number in range(ticks + 1):
            time.sleep(max(began + number * self.every - time.monotonic(), 0))
            if number < ticks:
                self.tick()
        end = self.wait(1, 1, time.monotonic())[0].time
        self.wait(WORKERS, AFTER, end)
        whole.append(pace(self.usual_steps(steps, self.every)))  # the machine may have become another
        paces[WORKERS] = statistics.mean(whole)
        lines = [line for line in timeline(self.job.folder) if line.time <= end]
        self.found = {**goodput(lines, began, self.kills, paces), "paces": paces, "whole": whole}

    def run_by_clock(self, steps: int, ticks: int) -> dict[str, Any]:
        """Return what was measured; with "failed" where it ended early. ``steps``: at least, of each pace."""
        failed = self.attempt(lambda: self.measure(steps, ticks))
        found = {**self.found, "kills": len(self.kills), "skipped": self.skipped, "megabytes": self.megabytes}
        return {**found, "failed": failed} if failed else found
