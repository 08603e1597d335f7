# SPDX-License-Identifier: Apache-2.0
"""Contenders that take turns on one machine: each is a job of its own processes, frozen while others run.

A benchmark starts every job once, lets it warm up, and then gives each a block of steps in turn, so that all see the
same machine and none shares it with another's threads. Workers connect to a socket in the file system, which network
namespaces do not separate, and wait there for their turn:

    interleaved.serve(step, figures)     # in a worker, once it has warmed up
"""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from lab.network import Spaces

SOCKET = "AGM_BENCH_SOCKET"  # not a name that workers' launchers drop
# For all jobs alike: glibc is to keep freed memory. Whether it gives that back to the kernel after a step, and takes
# new pages in the next, depends on what happens to lie at the end of the heap: worth 10 to 20 ms of a 160 ms step.
# Huge pages, so that it matters less which pages a job was given.
KEEP = {
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_MMAP_MAX_": "0",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
PATIENCE = 600.0  # seconds for a job to start and warm up, and for a block


def serve(step: Callable[[], None], figures: Callable[[], Mapping[str, Any]], rank: int) -> None:
    """In a worker: take steps when told to, and tell their seconds, until there is no more to do."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.connect(os.environ[SOCKET])
        said = line.makefile("rw", encoding="utf-8")
        _say(said, {"rank": rank, "pid": os.getpid()})
        for told in said:
            took = []
            for _ in range(json.loads(told)["steps"]):
                start = time.perf_counter()
                step()
                took.append(time.perf_counter() - start)
            _say(said, {"seconds": took, **figures()})


def _say(line: TextIO, what: Mapping[str, Any]) -> None:
    line.write(json.dumps(what) + "\n")
    line.flush()


@dataclass
class Job:
    """One contender that has warmed up: a line to every rank, and what it is asked next."""

    name: str
    lines: dict[int, TextIO] = field(default_factory=dict)
    pids: list[int] = field(default_factory=list)

    def block(self, steps: int) -> list[dict[str, Any]]:
        """Thaw, take so many steps, freeze; what each rank says."""
        self._signal(signal.SIGCONT)
        for line in self.lines.values():
            _say(line, {"steps": steps})
        told = [self.lines[rank].readline() for rank in sorted(self.lines)]
        self._signal(signal.SIGSTOP)
        if not all(told):
            raise RuntimeError(f"{self.name}: a worker ended in a block of {steps} steps")
        return [json.loads(one) for one in told]

    def freeze(self) -> None:
        """Nothing of it runs until its next block."""
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids:
            os.kill(pid, number)


class Stage:
    """Where jobs are started, in a network."""

    def __init__(self, network: Spaces) -> None:
        self.network = network
        self._folder = tempfile.TemporaryDirectory()
        self._path = str(Path(self._folder.name) / "stage")
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._port = 29600

    def __enter__(self) -> Stage:
        self._server.bind(self._path)
        self._server.listen()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.close()
        self._folder.cleanup()

    def start(self, name: str, command: Sequence[str], launcher: Sequence[str] = (), **more: str) -> Job:
        """Start a job, and return it warm and frozen.

        ``launcher``: what starts all of its workers at once; none: they are started one by one, with torchrun's
        variables. Raises RuntimeError, with the end of its output, if a process ends or does not get there in time.
        """
        self._port += 7  # a store of its own
        known = {SOCKET: self._path, **KEEP, **more}
        if launcher:
            started = [self.network.launch([*launcher, *command], known)]
        else:
            started = self.network.start(command, port=self._port, **known)
        job, deadline = Job(name), time.monotonic() + PATIENCE
        self._server.settimeout(0.5)
        while len(job.lines) < self.network.workers:
            try:
                line, _ = self._server.accept()
            except TimeoutError:
                ended = [process for process in started if process.poll() is not None]
                if ended or time.monotonic() > deadline:
                    output = ended[0].communicate()[0][-3000:] if ended else "it is not ready in time"
                    raise RuntimeError(f"{name}: {output}") from None
                continue
            line.settimeout(PATIENCE)
            file = line.makefile("rw", encoding="utf-8")
            hello = json.loads(file.readline())
            job.lines[hello["rank"]] = file
            job.pids.append(hello["pid"])
        job.freeze()
        return job
