# SPDX-License-Identifier: Apache-2.0
"""``horovodrun`` of an elastic job: a lighthouse, and a worker in each slot that a discovery script finds.

A slot whose worker has failed stays empty, so that a script with a mistake ends. The other workers go on, and new slots
get new workers.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from agmerge.backends import generations
from agmerge.horovod_door import arguments
from agmerge.horovod_door.arguments import Host
from agmerge.horovod_door.launch import LOOK, Interrupted, Started, end_all, interruptible
from agmerge.horovod_door.torch_names import MIN_WORKERS
from agmerge.runtime.workers import LIGHTHOUSE

DISCOVERY = 1.0  # seconds between two runs of the discovery script
Slot = tuple[str, int]  # a host, and a number on it


class Discovery:
    """Machines of the job, as a program prints them, or as ``-H`` or a host file names them once.

    Raises ``ValueError`` where the first answer is none.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self._program, self._slots = given.host_discovery_script, given.slots_per_host
        if self._program is None:
            text = Path(given.hostfile).read_text(encoding="utf-8") if given.hostfile else given.hosts
            number = given.most or given.workers or given.least
            self.hosts = arguments.parse_hosts(text, self._slots) if text else [Host("localhost", number)]
            return
        self.hosts = self._asked()
        threading.Thread(target=self._follow, name="agmerge discovers hosts", daemon=True).start()

    def _follow(self) -> None:
        """Ask again and again. An answer that cannot be read changes nothing."""
        while True:
            time.sleep(DISCOVERY)
            try:
                self.hosts = self._asked()
            except ValueError as error:
                sys.stderr.write(f"agmerge horovodrun: {error}; the machines stay as they are\n")

    def _asked(self) -> list[Host]:
        try:
            done = subprocess.run([self._program], capture_output=True, text=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise ValueError(f"--host-discovery-script {self._program}: {error}") from error
        return arguments.parse_hosts(done.stdout, self._slots)

    def slots(self) -> dict[Slot, Host]:
        """Return the slots that there are now."""
        return {(host.name, number): host for host in self.hosts for number in range(host.slots)}


class Job:
    """Workers of an elastic job. ``lighthouse``: its address, ``host:port``."""

    def __init__(self, given: argparse.Namespace, discovery: Discovery, lighthouse: str) -> None:
        self._given, self._discovery = given, discovery
        self._least = given.least or given.workers
        self._most = given.most or sys.maxsize
        self._first = given.workers or self._least  # workers without which the job does not begin
        self._shared = {**arguments.common(given, os.environ), LIGHTHOUSE: lighthouse, MIN_WORKERS: str(self._least)}
        self._slots: dict[Slot, Started] = {}  # with a worker that runs
        self._started = 0
        self._failed: dict[Slot, Started] = {}
        self._has_begun = self._is_over = False
        self._changes = -1  # of the workers, of which the first is the beginning
        self._few_since: float | None = None  # since when fewer workers than the least run

    @property
    def running(self) -> list[Started]:
        """Return the workers that run."""
        return list(self._slots.values())

    def look(self) -> int | None:
        """Start and end workers as slots come and go. Return the job's exit code; None: it goes on."""
        self._collect()
        if self._is_over:
            return None if self._slots else 0
        there = self._discovery.slots()
        if not self._has_begun:
            if len(there) < self._first:
                return self._waited(f"{len(there)} of {self._first} slots")
            self._has_begun = True
        self._fit(there)
        if len(self._slots) < self._least:
            return self._waited(f"{len(self._slots)} of {self._least} workers")
        self._few_since = None
        if self._given.reset_limit is not None and self._changes > self._given.reset_limit:
            return self._told(f"the workers changed {self._changes} times (--reset-limit {self._given.reset_limit})")
        return None

    def _collect(self) -> None:
        """Note which workers have ended. The first one that ends well has come to the end of the job."""
        for slot, worker in list(self._slots.items()):
            if worker.code is None:
                continue
            del self._slots[slot]
            worker.finish()
            if worker.code == 0:
                self._is_over = True
                continue
            self._failed[slot] = worker
            self._changes += 1
            self._tell(f"worker {worker.rank} on {worker.host.name} ended with {worker.code}; the others go on")

    def _fit(self, there: dict[Slot, Host]) -> None:
        """End the workers of slots that are gone, and start one in each slot that is free."""
        gone = [self._slots.pop(slot) for slot in list(self._slots) if slot not in there]
        if gone:
            self._changes += 1
            end_all(gone)
        free = [slot for slot in there if slot not in self._slots and slot not in self._failed]
        free = free[: max(self._most - len(self._slots), 0)]
        for slot in free:
            variables = {"HOROVOD_RANK": str(self._started), "HOROVOD_HOSTNAME": slot[0]}
            self._slots[slot] = Started(self._given, there[slot], self._started, {**self._shared, **variables})
            self._started += 1
        self._changes += bool(free)

    def _waited(self, what: str) -> int | None:
        """Return the exit code where workers have been missing for too long, or cannot come any more."""
        now = time.monotonic()
        self._few_since = self._few_since or now
        nobody_comes = self._given.host_discovery_script is None and not self._slots
        if now - self._few_since > self._given.elastic_timeout or (nobody_comes and self._has_begun):
            return self._told(f"{what}; no more have come")
        return None

    def _told(self, why: str) -> int:
        """Write why the job ends, and return its exit code: that of the first worker that has failed."""
        self._tell(f"the job ends: {why}")
        return next((worker.code or 1 for worker in self._failed.values()), 1)

    def _tell(self, what: str) -> None:
        sys.stderr.write(f"agmerge horovodrun: {what}\n")


def run(given: argparse.Namespace) -> int:
    """Run an elastic job. Return 0 once a worker has come to the end of its script, and the others have ended.

    Raises ``ValueError`` for machines that cannot be found.
    """
    store = generations.serve(0)
    discovery = Discovery(given)
    address = arguments.address_for(discovery.hosts)
    job = Job(given, discovery, f"{address}:{store.port}")
    try:
        with interruptible():
            while (code := job.look()) is None:
                time.sleep(LOOK)
            return code
    except Interrupted as caught:
        return 128 + int(caught.args[0])
    finally:
        end_all(job.running)
