# SPDX-License-Identifier: Apache-2.0
"""Workers of an elastic job that are killed, stopped and started: the others go on, and one that comes is a peer."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from launching import HERE, environment, reserved_port

STEPS = 300


class Job:
    """Lighthouse and workers of one job, in processes."""

    def __init__(self, folder: Path, setting: dict[str, Any]) -> None:
        self.folder, self.setting, self.port = folder, setting, reserved_port()
        self.workers: list[subprocess.Popen[str]] = []
        self.lighthouse = subprocess.Popen(
            [sys.executable, "-m", "agmerge", "lighthouse", "--port", self.port],
            env=environment(), stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.lighthouse.stdout is not None
        said = self.lighthouse.stdout.readline().strip()
        assert said == f"AGMERGE_LIGHTHOUSE={socket.gethostname()}:{self.port}"

    def start(self) -> subprocess.Popen[str]:
        """Start one more worker."""
        number = len(self.workers)
        with open(self.folder / f"{number}.log", "w") as log:
            script = [str(HERE / "going_on.py"), str(self.folder), str(STEPS), json.dumps(self.setting)]
            where = environment(AGMERGE_LIGHTHOUSE=f"127.0.0.1:{self.port}")
            self.workers.append(
                subprocess.Popen([sys.executable, *script], env=where, stdout=log, stderr=subprocess.STDOUT, text=True)
            )
        return self.workers[-1]

    def lines(self, worker: subprocess.Popen[str]) -> list[list[Any]]:
        """Return what a worker has written so far: step, workers, digest, seconds."""
        path = self.folder / f"{worker.pid}.lines"
        whole = path.read_text(encoding="utf-8").rpartition("\n")[0] if path.exists() else ""
        return [json.loads(line) for line in whole.splitlines()]

    def logs(self) -> str:
        """Return the ends of what all workers have printed."""
        return "\n".join(path.read_text()[-1500:] for path in sorted(self.folder.glob("*.log")))

    def wait_for(self, what: Callable[[], bool], seconds: float = 40.0) -> None:
        """Wait until ``what()`` is true, or fail with what workers have printed."""
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, self.logs()
            time.sleep(0.02)


@contextmanager
def job(folder: Path, setting: dict[str, Any]) -> Iterator[Job]:
    """Yield a job; none of its processes outlives the block."""
    made = Job(folder, setting)
    try:
        yield made
    finally:
        for process in (*made.workers, made.lighthouse):
            process.kill()
            process.wait()


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "setting",
    [
        {},
        pytest.param({"sync": "updates"}, marks=pytest.mark.long),
        pytest.param({"compression": "dgc", "density": 0.1}, marks=pytest.mark.long),
    ],
    ids=["default", "updates", "dgc"],
)  # fmt: skip
def test_the_others_go_on_and_who_comes_is_a_peer(tmp_path: Path, setting: dict[str, Any]) -> None:
    """The oldest, which serves the group's store, is killed; one comes; one is stopped, and goes on too late."""
    with job(tmp_path, setting) as here:
        first, second, third = here.start(), here.start(), here.start()
        here.wait_for(lambda: all(len(here.lines(one)) >= 20 for one in (first, second, third)))
        oldest = first  # any of them: which one is it says the lighthouse, not the order of starts
        oldest.kill()
        here.wait_for(lambda: here.lines(third)[-1][1] == 2)
        fourth = here.start()
        here.wait_for(lambda: len(here.lines(fourth)) >= 10)
        second.send_signal(signal.SIGSTOP)
        here.wait_for(lambda: here.lines(third)[-1][1] == 2)
        second.send_signal(signal.SIGCONT)
        for worker in (third, fourth):
            assert worker.wait(60) == 0, here.logs()
        assert second.wait(60) != 0 and "go on without this one" in here.logs()

        by_step: dict[int, set[str]] = {}
        for worker in here.workers:
            for step, _, digest, _ in here.lines(worker):
                by_step.setdefault(step, set()).add(digest)
        assert {step: found for step, found in by_step.items() if len(found) > 1} == {}
        steps = [line[0] for line in here.lines(third)]
        assert steps == list(range(1, STEPS + 1))
        assert [line[0] for line in here.lines(fourth)][0] > 20
        sizes = [size for _, size, _, _ in here.lines(third)]
        assert sizes[0] == 3 and sizes[-1] == 2 and {2, 3} == set(sizes)
