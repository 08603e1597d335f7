# SPDX-License-Identifier: Apache-2.0
"""Run commands to their end: signals are passed on, and the status is theirs."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

PASSED_ON = (signal.SIGINT, signal.SIGTERM)
GRACE = 60.0  # seconds for the others to end when one has, and again when they were told to
# Open MPI gives workers one second to end at a SIGTERM, and horovodrun leaves it running; this one it hands on to them.
HANDED_ON = signal.SIGUSR1
OPEN_MPI = ("mpirun", "mpiexec", "orterun", "prterun")
EVERY = 0.05  # seconds from one look at the processes to the next

Process = subprocess.Popen[bytes]


class Ended(NamedTuple):
    """Say how commands have ended."""

    status: int  # of the first one that failed, as a shell has it: 128 + the signal that killed it; 0: none failed
    told: bool  # by a signal to this process


def run(commands: Sequence[Sequence[str]], grace: float = GRACE) -> Ended:
    """Run ``commands`` side by side; when one ends, so do all: at once if it failed, else within ``grace`` seconds.

    A command that starts with "ssh" is told to end by the end of its input, as ``commands.over_ssh`` wants it, others
    by SIGTERM, for which workers under Open MPI get SIGUSR1. Programs beside this Python come first, activated or not.
    Raises ``FileNotFoundError`` where one is not there.
    """
    folders = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    env = {**os.environ, "PATH": os.pathsep.join(folders)}
    processes: list[Process] = []
    with _passing_on(processes) as told:
        try:
            for command in commands:
                if not told:
                    kept_open = subprocess.PIPE if command[0] == "ssh" else None
                    # A session of its own: a terminal's Ctrl-C reaches it through us alone, and so once.
                    processes.append(subprocess.Popen(command, stdin=kept_open, env=env, start_new_session=True))
                    if told:  # while it was being started, so that nobody told it
                        _tell(processes[-1:], told[-1])
        except FileNotFoundError:
            _tell(processes, signal.SIGTERM)
            _codes(processes, grace)
            raise
        codes = _codes(processes, grace)
    return Ended(next((code if code > 0 else 128 - code for code in codes if code), 0), bool(told))


def _codes(processes: Iterable[Process], grace: float) -> list[int]:
    """Return the codes of processes in the order in which they have ended, and see to it that all end."""
    left, codes = list(processes), list[int]()
    deadline, last_resort = math.inf, False
    while left:
        over = [process for process in left if process.poll() is not None]
        codes += [process.returncode for process in over]
        left = [process for process in left if process not in over]
        if over and deadline == math.inf:
            deadline = time.monotonic() + (0 if any(codes) else grace)
        if time.monotonic() >= deadline or (any(codes) and not last_resort):
            _tell(left, signal.SIGKILL if last_resort else signal.SIGTERM)
            deadline, last_resort = time.monotonic() + grace, True
        time.sleep(EVERY if left else 0)
    return codes


def _tell(processes: Iterable[Process], number: int) -> None:
    """Send a signal, or what stands for SIGINT and SIGTERM on another host."""
    for process in processes:
        if process.stdin is not None and number != signal.SIGKILL:
            with suppress(BrokenPipeError):
                process.stdin.close()
        elif openmpis := [pid for pid in family(process.pid) if _is_openmpi(pid)]:
            for pid in openmpis:
                with suppress(ProcessLookupError):
                    os.kill(pid, HANDED_ON if number == signal.SIGTERM else number)
        else:
            process.send_signal(number)


def family(pid: int) -> Iterator[int]:
    """Yield a process and all that descend from it (Linux; elsewhere itself alone)."""
    yield pid
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from family(int(child))


def _is_openmpi(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip() in OPEN_MPI
    return False


@contextmanager
def _passing_on(processes: list[Process]) -> Iterator[list[int]]:
    """Pass signals on to what ``processes`` holds by then; gives the list of those that came."""
    came: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        came.append(number)
        _tell(processes, number)

    before = {number: signal.signal(number, pass_on) for number in PASSED_ON}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
