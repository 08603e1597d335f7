# SPDX-License-Identifier: Apache-2.0
"""Processes of workers, on this machine and by ssh on others: their output, and their end."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO

from agmerge.horovod_door.arguments import Host

GRACE = 5.0  # seconds that a worker has to end after SIGTERM
LOOK = 0.05  # seconds between two looks at the workers
FORWARDED = ("AGMERGE_", "HOROVOD_", "NCCL_", "GLOO_", "OMP_", "CUDA_", "PYTHON", "LD_LIBRARY_PATH", "PATH")
# On another machine: the worker ends when the connection does, which is this shell's standard input.
REMOTE = (
    "cd {folder} || exit 1; exec 3<&0; env {variables} {command} </dev/null 3<&- & worker=$!; "
    "(cat <&3 >/dev/null; kill -TERM $worker 2>/dev/null) & watcher=$!; wait $worker; code=$?; "
    "kill $watcher 2>/dev/null; exit $code"
)


class Started:
    """Process of one worker, on this machine or behind ssh. Its output is shown, each line after its number.

    ``variables``: beside those of this process. ``host``: its machine.
    """

    def __init__(self, given: argparse.Namespace, host: Host, rank: int, variables: Mapping[str, str]) -> None:
        self.host, self.rank = host, rank
        command, env = list(given.program), {**os.environ, **variables}
        if not host.is_here:
            command = _over_ssh(given, host, variables)
        if given.verbose:
            sys.stderr.write(f"agmerge horovodrun: worker {rank} on {host.name}: {shlex.join(command)}\n")
        try:
            self._process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL if host.is_here else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a group of its own, with all that the worker starts
            )
        except OSError as error:
            raise ValueError(f"cannot run {command[0]!r}: {error}") from error
        self._threads = []
        for kind, out in (("stdout", sys.stdout), ("stderr", sys.stderr)):
            copying = (getattr(self._process, kind), out, kind)
            self._threads.append(threading.Thread(target=self._copy, args=copying, daemon=True))
            self._threads[-1].start()

    def _copy(self, source: IO[bytes], out: IO[str], kind: str) -> None:
        """Show each line of the worker's output until it ends."""
        for line in iter(source.readline, b""):
            text = line.decode(errors="replace").rstrip("\n")
            with suppress(ValueError, OSError):  # whoever reads it has ended
                out.write(f"[{self.rank}]<{kind}>:{text}\n")
                out.flush()

    @property
    def code(self) -> int | None:
        """Return the exit code, 128 and more after a signal; None: it runs."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def signal(self, number: int) -> None:
        """Send a signal to the worker and to what it has started."""
        if self._process.stdin is not None:  # ssh: the shell there ends the worker
            with suppress(OSError):
                self._process.stdin.close()
        if self._process.stdin is None or number == signal.SIGKILL:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def finish(self) -> None:
        """Wait for the rest of the output of a worker that has ended, for a moment: children may hold it open."""
        self._process.wait()
        for thread in self._threads:
            thread.join(1.0)


def _over_ssh(given: argparse.Namespace, host: Host, variables: Mapping[str, str]) -> list[str]:
    """Return the command that runs a worker on another machine, in a folder of this one's name.

    ``variables``: the worker's; those of this process go with them whose names begin as ``FORWARDED`` says.
    """
    named = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)} | dict(variables)
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in named.items())
    remote = REMOTE.format(folder=shlex.quote(os.getcwd()), variables=settings, command=shlex.join(given.program))
    options = ["-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no", "-o", f"ConnectTimeout={given.start_timeout}"]
    options += ["-p", str(given.ssh_port)] if given.ssh_port else []
    options += ["-i", given.ssh_identity_file] if given.ssh_identity_file else []
    return ["ssh", *options, host.name, remote]


def end_all(workers: Sequence[Started]) -> None:
    """End workers: SIGTERM, then SIGKILL to those that go on."""
    for worker in workers:
        worker.signal(signal.SIGTERM)
    end = time.monotonic() + GRACE
    while any(worker.code is None for worker in workers) and time.monotonic() < end:
        time.sleep(LOOK)
    for worker in workers:
        worker.signal(signal.SIGKILL)
        worker.finish()


class Interrupted(BaseException):
    """Signal to this launcher, whose workers are to end. ``args[0]``: its number."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise :class:`Interrupted` inside for SIGINT, SIGTERM and SIGHUP."""

    def interrupt(number: int, _: object) -> None:
        raise Interrupted(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
