# SPDX-License-Identifier: Apache-2.0
"""Lighthouse and workers of an elastic job, in processes that a test kills, stops and starts."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launching import HERE, environment, reserved_port

STEPS = 300


class Job:
    """Lighthouse and workers of one job.

    ``at(number)``: what a command begins with where it is to run on the host of that number; the lighthouse is on
    host 0, at ``address``. ``script``: what a worker runs, with a folder, a number of steps, and a setting.
    """

    def __init__(
        self,
        folder: Path,
        setting: dict[str, Any],
        at: Callable[[int], Sequence[str]] = lambda _: (),
        address: str = "127.0.0.1",
        script: Path = HERE / "going_on.py",
    ) -> None:
        self._script = script
        self.folder, self.setting, self.port = folder, setting, reserved_port()
        self.workers: list[subprocess.Popen[str]] = []
        self._at, self._address = at, address
        self.lighthouse = self.shine()

    def shine(self) -> subprocess.Popen[str]:
        """Start the lighthouse."""
        command = [*self._at(0), sys.executable, "-m", "agmerge", "lighthouse", "--port", self.port]
        self.lighthouse = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
        assert self.lighthouse.stdout is not None
        said = self.lighthouse.stdout.readline().strip()
        address, _, port = said.removeprefix("AGMERGE_LIGHTHOUSE=").partition(":")
        assert port == self.port and socket.inet_aton(address)
        return self.lighthouse

    def start(self, host: int = 0, steps: int = STEPS, **more: Any) -> subprocess.Popen[str]:
        """Start one more worker on a host, with the job's setting and ``more``."""
        number = len(self.workers)
        with open(self.folder / f"{number}.log", "w") as log:
            script = [str(self._script), str(self.folder), str(steps), json.dumps({**self.setting, **more})]
            where = environment(AGMERGE_LIGHTHOUSE=f"{self._address}:{self.port}")
            command = [*self._at(host), sys.executable, *script]
            self.workers.append(subprocess.Popen(command, env=where, stdout=log, stderr=subprocess.STDOUT, text=True))
        return self.workers[-1]

    def lines(self, worker: subprocess.Popen[str]) -> list[list[Any]]:
        """Return what a worker has written so far: step, workers, digest, seconds, generation."""
        path = self.folder / f"{worker.pid}.lines"
        whole = path.read_text(encoding="utf-8").rpartition("\n")[0] if path.exists() else ""
        return [json.loads(line) for line in whole.splitlines()]

    def size(self, worker: subprocess.Popen[str]) -> int:
        """Return how many workers there were at a worker's last step; 0: it has made none."""
        lines = self.lines(worker)
        return int(lines[-1][1]) if lines else 0

    def log(self, worker: subprocess.Popen[str]) -> str:
        """Return what a worker has printed."""
        return (self.folder / f"{self.workers.index(worker)}.log").read_text()

    def logs(self) -> str:
        """Return the ends of what all workers have printed."""
        return "\n".join(path.read_text()[-1500:] for path in sorted(self.folder.glob("*.log")))

    def wait_for(self, what: Callable[[], bool], seconds: float = 150.0) -> None:
        """Wait until ``what()`` is true, or fail with what workers have printed."""
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, self.logs()
            time.sleep(0.02)

    def wait_for_steps(self, count: int, *workers: subprocess.Popen[str]) -> None:
        """Wait until each of ``workers`` has made so many steps more."""
        before = [len(self.lines(one)) for one in workers]
        self.wait_for(
            lambda: all(len(self.lines(one)) >= count + had for one, had in zip(workers, before, strict=True))
        )

    def differing(self) -> dict[int, set[str]]:
        """Return the steps after which parameters were not the same on all workers, and what they were."""
        by_step: dict[int, set[str]] = {}
        for worker in self.workers:
            for step, _, digest, *_ in self.lines(worker):
                by_step.setdefault(step, set()).add(digest)
        return {step: found for step, found in by_step.items() if len(found) > 1}


@contextmanager
def job(folder: Path, setting: dict[str, Any], *place: Any, **more: Any) -> Iterator[Job]:
    """Yield a job, made with ``place`` and ``more``, too; none of its processes outlives the block."""
    made = Job(folder, setting, *place, **more)
    try:
        yield made
    finally:
        for process in (*made.workers, made.lighthouse):
            process.kill()
            process.wait()
