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
import time

from agmerge.backends import generations
from agmerge.horovod_door import arguments
from agmerge.horovod_door.arguments import Host
from agmerge.horovod_door.processes import LOOK, Interrupted, Started, end_all, interruptible
from agmerge.horovod_door.torch_names import FIRST_WORKERS, MIN_WORKERS
from agmerge.runtime.workers import LIGHTHOUSE

DISCOVERY = 1.0  # seconds between two runs of the discovery script
Slot = tuple[str, int]  # a host, and a number on it


def hosts(given: argparse.Namespace) -> list[Host]:
    """Return the machines that there are now. Raises ``ValueError`` where the discovery script cannot tell."""
    program = given.host_discovery_script
    if program is None:
        return arguments.named_hosts(given, given.most or given.workers or given.least)
    try:
        done = subprocess.run([program], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(f"--host-discovery-script {program}: {error}") from error
    return arguments.parse_hosts(done.stdout, given.slots_per_host)


class Job:
    """Workers of an elastic job on ``there``. ``lighthouse``: its address, ``host:port``."""

    def __init__(self, given: argparse.Namespace, there: list[Host], lighthouse: str) -> None:
        self._given, self._there, self._looked = given, there, time.monotonic()
        self._least, self._most = given.least or given.workers, given.most or sys.maxsize
        self._first = given.workers or self._least
        numbers = {MIN_WORKERS: str(self._least), FIRST_WORKERS: str(self._first)}
        self._shared = {**arguments.common(given, os.environ), LIGHTHOUSE: lighthouse, **numbers}
        self._running: dict[Slot, Started] = {}
        self._failed: dict[Slot, Started] = {}
        self._started = 0
        self._is_over = False  # a worker has come to the end of its script
        self._changes = -1  # of the workers; the first one is the beginning
        self._few_since: float | None = None  # since when there are fewer workers than the least

    def look(self) -> int | None:
        """Start and end workers as slots come and go. Return the job's exit code; None: it goes on."""
        self._collect()
        if self._is_over:
            return None if self._running else 0
        self._discover()
        slots = {(host.name, number): host for host in self._there for number in range(host.slots)}
        if self._started or len(slots) >= self._first:
            self._fit(slots)
        limit, now = self._given.reset_limit, time.monotonic()
        if limit is not None and self._changes > limit:
            return self._ended(f"the workers have changed more than {limit} times")
        self._few_since = None if len(self._running) >= self._least else self._few_since or now
        is_hopeless = self._given.host_discovery_script is None and not self._running
        if self._few_since is not None and (is_hopeless or now - self._few_since > self._given.elastic_timeout):
            return self._ended(f"{len(self._running)} workers run, fewer than {self._least}, and no more have come")
        return None

    def _collect(self) -> None:
        """Note which workers have ended."""
        for slot in [slot for slot, worker in self._running.items() if worker.code is not None]:
            worker = self._running.pop(slot)
            worker.finish()
            if worker.code == 0:
                self._is_over = True
                continue
            self._failed[slot] = worker
            self._changes += 1
            _tell(f"worker {worker.rank} on {worker.host.name} ended with {worker.code}; the others go on")

    def _discover(self) -> None:
        """Ask for the machines again, if it is time. An answer that cannot be read changes nothing."""
        if time.monotonic() - self._looked < DISCOVERY:
            return
        try:
            self._there = hosts(self._given)
        except ValueError as error:
            _tell(f"{error}; the machines stay as they are")
        self._looked = time.monotonic()

    def _fit(self, slots: dict[Slot, Host]) -> None:
        """End the workers of slots that are gone, and start one in each slot that is free."""
        gone = [self._running.pop(slot) for slot in list(self._running) if slot not in slots]
        end_all(gone)
        free = [slot for slot in slots if slot not in self._running and slot not in self._failed]
        free = free[: max(self._most - len(self._running), 0)]
        for slot in free:
            variables = {**self._shared, "HOROVOD_RANK": str(self._started), "HOROVOD_HOSTNAME": slot[0]}
            self._running[slot] = Started(self._given, slots[slot], self._started, variables)
            self._started += 1
        self._changes += bool(gone) + bool(free)

    def _ended(self, why: str) -> int:
        """Write why the job ends, and return its exit code: that of the first worker that has failed."""
        _tell(f"the job ends: {why}")
        return next((worker.code or 1 for worker in self._failed.values()), 1)

    def end(self) -> None:
        """End all workers."""
        end_all(list(self._running.values()))


def _tell(what: str) -> None:
    sys.stderr.write(f"agmerge horovodrun: {what}\n")


def run(given: argparse.Namespace) -> int:
    """Run an elastic job. Return 0 once a worker has come to the end of its script, and the others have ended.

    Raises ``ValueError`` for machines that cannot be found.
    """
    store, there = generations.serve(0), hosts(given)
    job = Job(given, there, f"{arguments.address_for(there)}:{store.port}")
    try:
        with interruptible():
            while (code := job.look()) is None:
                time.sleep(LOOK)
            return code
    except Interrupted as caught:
        return 128 + int(caught.args[0])
    finally:
        job.end()
