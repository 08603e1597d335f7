# SPDX-License-Identifier: Apache-2.0
"""One contender's turn: start it, kill and replace workers, and find pauses in what the workers have written."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from recovery.contenders import WORKERS, Contender

MEASURED = ("deaths", "from_kill", "arrivals", "repeated", "steps", "megabytes")
AFTER = 5  # steps after a death, and after an arrival, before anything else happens


@dataclass(frozen=True)
class Line:
    """A step that a worker has finished."""

    time: float  # seconds, of one clock
    pid: int
    step: int  # of the training
    workers: int
    begun: int  # steps that this process has begun


@dataclass(frozen=True)
class Pause:
    """Longest time in which no worker finished a step."""

    before: float  # the last step of before
    after: float  # the first one after it


def timeline(folder: Path) -> list[Line]:
    """Return what all workers have written, by time."""
    found = []
    for path in folder.glob("*.lines"):
        whole = path.read_text().rpartition("\n")[0]
        for line in whole.splitlines():
            at, step, workers, begun = json.loads(line)
            found.append(Line(at, int(path.stem), step, workers, begun))
    return sorted(found, key=lambda line: line.time)


def pause(lines: Sequence[Line], since: float) -> Pause:
    """Return the longest pause that ends after ``since``."""
    between = [(first.time, second.time) for first, second in pairwise(lines) if second.time > since]
    return Pause(*max(between, key=lambda pair: pair[1] - pair[0]))


def usual(lines: Sequence[Line]) -> float:
    """Return the median seconds of a worker's steps, of those between which the number of workers is the same."""
    found = []
    for pid in {line.pid for line in lines}:
        of_one = [line for line in lines if line.pid == pid]
        found += [b.time - a.time for a, b in pairwise(of_one) if a.workers == b.workers]
    return statistics.median(found)


def beyond(lines: Sequence[Line], gap: Pause) -> float:
    """Return the seconds of a pause beyond a usual step of those who end it: two workers' steps are not three's."""
    return gap.after - gap.before - usual([line for line in lines if line.time >= gap.after])


def repeated(lines: Sequence[Line], gap: Pause) -> int:
    """Return how many steps were begun in vain around a pause: the one under way, and those whose results are lost."""
    before = [line for line in lines if line.time <= gap.before]
    now = next(line for line in lines if line.time >= gap.after)
    last = [line for line in before if line.pid == now.pid]
    if last:  # it goes on with what it had
        return (now.begun - last[-1].begun) - (now.step - last[-1].step)
    return 1 + max(line.step for line in before) - (now.step - now.begun)


class Turn:
    """Running contender, and what is measured of it."""

    def __init__(self, job: Contender, patience: float, seed: int) -> None:
        self.job, self.patience = job, patience
        self.chance = random.Random(seed)
        self.killed: set[int] = set()
        self.began = 0.0  # after the first steps
        self.deaths: list[float] = []
        self.from_kill: list[float] = []  # seconds to the next finished step, nothing taken off
        self.arrivals: list[float] = []
        self.repeated: list[int] = []
        self.steps: list[float] = []  # seconds of usual ones
        self.megabytes: list[float] = []  # of a step, of all workers, on the link

    def wait(self, workers: int, count: int, since: float) -> list[Line]:
        """Wait until so many workers have each finished ``count`` steps ``since``; return all lines since then."""
        end = time.monotonic() + self.patience
        while True:
            lines = [line for line in timeline(self.job.folder) if line.time >= since]
            pids = [line.pid for line in lines]
            if sum(pids.count(pid) >= count for pid in set(pids)) >= workers:
                return lines
            if self.job.ended(self.killed):
                raise ChildProcessError("a process that nobody has killed has ended")
            if time.monotonic() > end:
                raise TimeoutError(f"no {count} steps of {workers} workers within {self.patience:g} s")
            time.sleep(0.05)

    def usual_steps(self, count: int, seconds: float = 0.0) -> list[Line]:
        """Wait for so many steps and seconds in which nothing happens, measure them, and return their lines."""
        began, had = time.monotonic(), on_link()
        time.sleep(seconds)  # reading lines all the time would take part of a core
        lines = self.wait(WORKERS, count, began)
        made = lines[-1].step - lines[0].step + 1
        self.megabytes.append((on_link() - had) / made / 1e6)
        self.steps.append(usual(lines))
        return lines

    def strike(self, pids: Collection[int]) -> tuple[int, float]:
        """Kill one of these workers, drawn at random; return which, and when."""
        victim = self.chance.choice(sorted(pids))
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        self.killed.add(victim)
        return victim, killed

    def kill(self, count: int) -> None:
        """Kill a worker after ``count`` steps, replace it some steps later, and measure both pauses."""
        lines = self.usual_steps(count)
        began = lines[0].time
        victim, killed = self.strike({line.pid for line in lines})
        needed = WORKERS if self.job.replaces else WORKERS - 1
        self.wait(needed, AFTER, killed)
        lines = [line for line in timeline(self.job.folder) if line.time >= began and line.pid != victim]
        gap = pause(lines, killed)
        self.deaths.append(beyond(lines, gap))
        self.from_kill.append(gap.after - killed)
        self.repeated.append(repeated(lines, gap))
        if self.job.replaces:
            return
        came = time.monotonic()
        self.job.replace()
        self.wait(WORKERS, AFTER, came)
        lines = [line for line in timeline(self.job.folder) if line.time >= killed and line.pid != victim]
        self.arrivals.append(beyond(lines, pause(lines, came)))

    def attempt(self, body: Callable[[], None]) -> str:
        """Start the job and, after its first steps, call ``body``; return why that failed, empty where it did not."""
        try:
            self.job.start()
            self.wait(WORKERS, 3, 0.0)
            self.began = time.monotonic()
            body()
        except (TimeoutError, OSError) as error:
            log = (self.job.folder / "log").read_text()[-1500:]
            return f"{error}; its log ends: {log}"
        return ""

    def run(self, kills: int, steps: int) -> dict[str, Any]:
        """Return what was measured; with "failed" where it ended early. ``steps``: at least, from one kill to another.

        The moment of a kill is drawn, so that it falls anywhere between two files.
        """

        def body() -> None:
            for _ in range(kills):
                self.kill(steps + self.chance.randrange(steps))

        failed = self.attempt(body)
        found = {name: getattr(self, name) for name in MEASURED}
        if failed:
            return {**found, "failed": failed}
        lines = [line for line in timeline(self.job.folder) if line.time >= self.began]
        useful, seconds = lines[-1].step - lines[0].step, lines[-1].time - lines[0].time
        return {**found, "useful": useful, "seconds": seconds}


def on_link() -> int:
    """Return the bytes that the loopback device of this namespace has carried."""
    rows = [row.split(":") for row in Path("/proc/net/dev").read_text().splitlines() if ":" in row]
    return next(int(counters.split()[0]) for name, counters in rows if name.strip() == "lo")
