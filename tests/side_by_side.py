# SPDX-License-Identifier: Apache-2.0
"""Plug-in of pytest: ``--processes N`` runs N files at a time, in forks of the process that has collected all tests.

To import the tests takes half a minute of one core, for every process that does. A fork has them at once. Files with
real workers begin first, at most `LAUNCHING` at a time: much of their time is waiting, in which the other files run.
What belongs to one process, such as its number, must not be asked for when a file is imported.
"""

from __future__ import annotations

import gc
import os
import signal
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

import pytest
import torch

LAUNCHING = 2  # processes that run files with real workers
WORKERS = Path(__file__).parent / "distributed"
RECORD = 4  # bytes of a file's number in a queue
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []  # those that we may use


class SideBySide:
    """The loop over all tests, by ``processes`` forks. What their tests report is reported here."""

    def __init__(self, config: pytest.Config, processes: int) -> None:
        self._config, self._processes = config, processes
        self._files: list[list[pytest.Item]] = []  # the tests of each
        self._queues: list[int] = []  # the places of files with real workers, and of the others: ends of pipes
        self._pids: list[int] = []  # the forks'
        self._parent: Connection | None = None  # in a fork: where its reports go

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run all tests; pytest calls this. If some could not be collected, pytest itself says so."""
        if self._config.option.collectonly or session.testsfailed:
            return None
        files: dict[Path, list[pytest.Item]] = {}
        for item in session.items:
            files.setdefault(item.path, []).append(item)
        self._files = list(files.values())
        self._queues = [
            _queue([place for place, file in enumerate(files) if (WORKERS in file.parents) == launching])
            for launching in (True, False)
        ]
        self._config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one folder, which pytest removes
        gc.collect()
        gc.freeze()  # else the first collection in a fork copies all memory
        try:
            self._run(session)
        finally:
            for pid in self._pids:
                os.kill(pid, signal.SIGTERM)  # one that has ended is there until we have waited for it
                os.waitpid(pid, 0)
        return True

    def _run(self, session: pytest.Session) -> None:
        """Start forks and report what they send. If one dies its test has failed, and another takes its place."""
        hook = self._config.hook
        forks = {end: number for number, end in enumerate(self._fork(n, session) for n in range(self._processes))}
        running: dict[Connection, tuple[str, tuple[str, int | None, str]]] = {}
        while forks:
            for fork in wait(list(forks)):
                try:
                    said = fork.recv()  # type: ignore[union-attr]
                except EOFError:
                    text = "The process of this test has died. The rest of its file was not run."
                    died = pytest.TestReport(*running.pop(fork), {}, "failed", text, "call")
                    hook.pytest_runtest_logreport(report=died)
                    number = forks.pop(fork)
                    forks[self._fork(number, session)] = number
                    continue
                if said is None:
                    del forks[fork]
                elif isinstance(said, tuple):
                    running[fork] = said
                else:
                    report = hook.pytest_report_from_serializable(config=self._config, data=said)
                    hook.pytest_runtest_logreport(report=report)
            if session.shouldfail or session.shouldstop:
                raise session.Interrupted(session.shouldfail or session.shouldstop)

    def _fork(self, number: int, session: pytest.Session) -> Connection:
        """Start a process that runs files as long as there are any; return where its reports come from."""
        ours, theirs = Pipe(duplex=False)
        if pid := os.fork():
            theirs.close()
            self._pids.append(pid)
            return ours
        try:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # without a parent it ends
            # After a fork torch replaces its pool at the first call, and threads that make it together find none.
            torch.set_num_threads(torch.get_num_threads())
            self._parent = theirs
            self._config.pluginmanager.unregister(name="terminalreporter")
            silent = pytest.TerminalReporter(self._config, open(os.devnull, "w"))
            silent.pytest_sessionstart(session)
            self._config.pluginmanager.register(silent, "terminalreporter")
            for queue in self._queues[number >= LAUNCHING :]:
                _keep_to(None if queue == self._queues[0] else number)
                for items in map(self._files.__getitem__, _taken(queue)):
                    for item, following in zip(items, [*items[1:], None], strict=True):
                        self._config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            theirs.send(None)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        """Tell the parent which test begins; pytest calls this."""
        if self._parent:
            self._parent.send((nodeid, location))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send a report to the parent; pytest calls this."""
        if self._parent:
            hook = self._config.hook
            self._parent.send(hook.pytest_report_to_serializable(config=self._config, report=report))


def _queue(places: list[int]) -> int:
    """Return the end of a pipe with these numbers. Processes that read from it share them."""
    reads, writes = os.pipe()
    os.write(writes, b"".join(place.to_bytes(RECORD, "big") for place in places))
    os.close(writes)
    return reads


def _taken(queue: int) -> Iterator[int]:
    """Yield numbers from a queue as long as there are any."""
    while place := os.read(queue, RECORD):
        yield int.from_bytes(place, "big")


def _keep_to(number: int | None) -> None:
    """Keep this process to one core, by its number, or to none.

    Ranks are threads of which one has Python's lock at a time. If that wanders between cores with every message, a
    quarter of the time is lost.
    """
    if CORES:
        os.sched_setaffinity(0, CORES if number is None else {CORES[number % len(CORES)]})
