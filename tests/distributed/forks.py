# SPDX-License-Identifier: Apache-2.0
"""Ranks that start at once: a process that has imported torch and agmerge forks each of them.

`Forked` asks for a rank. The process at the other end runs this file: it forks a rank, which becomes what ``python
SCRIPT ARGUMENTS`` would be, and a process that waits for the rank's end, to say how it ended.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import IO, Any

LONGEST = 1 << 20  # bytes of what is asked for


class Forked:
    """Rank under way, with the methods of `subprocess.Popen` that tests call. What it prints is added to ``log``."""

    def __init__(self, script: Path, arguments: Sequence[str], env: Mapping[str, str], cwd: Path, log: IO[str]) -> None:
        said, says = os.pipe()
        request = {"argv": [str(script), *arguments], "env": dict(env), "cwd": str(cwd)}
        socket.send_fds(_parent(env.get("PYTHONPATH", "")), [json.dumps(request).encode()], [log.fileno(), says])
        os.close(says)
        self._said = os.fdopen(said)
        self.pid = int(self._said.readline())
        self.returncode: int | None = None  # minus the signal's number if one has ended it

    def poll(self) -> int | None:
        """Return the exit status, None as long as it runs."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its exit status."""
        if self.returncode is None:
            if not select.select([self._said], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout or 0.0)
            self.returncode = int(self._said.readline())
            self._said.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it unless it has ended."""
        self.send_signal(signal.SIGKILL)


@functools.cache
def _parent(path: str) -> socket.socket:
    """Start the process that forks; return the end of a connection on which it is asked."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], env=env)
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def next_rank(asked: socket.socket) -> dict[str, Any] | None:
    """Fork what is asked for: return in each rank, with what it is to run, and None once nobody can ask any more."""
    while True:
        text, files, *_ = socket.recv_fds(asked, LONGEST, 2)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass  # who waited for a rank has ended
        if not text:
            return None
        if os.fork() == 0:
            asked.close()
            log, says = files
            rank = os.fork()
            if rank == 0:
                os.close(says)
                for standard in (1, 2):
                    os.dup2(log, standard)
                return dict(json.loads(text))
            os.write(says, f"{rank}\n".encode())
            os.write(says, f"{os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])}\n".encode())
            os._exit(0)
        for file in files:
            os.close(file)


def become(argv: list[str], env: dict[str, str], cwd: str) -> ModuleType:
    """Make this process that of ``python ARGV``; return its main module, which has not been run."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv, sys.path[0] = argv, str(Path(argv[0]).parent)
    main = ModuleType("__main__")
    main.__file__ = argv[0]
    sys.modules["__main__"] = main
    return main


if __name__ == "__main__":
    import agmerge  # noqa: F401 (once, for all ranks)

    request = next_rank(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        main = become(**request)
        exec(compile(Path(sys.argv[0]).read_bytes(), sys.argv[0], "exec"), main.__dict__)
