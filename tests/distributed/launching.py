# SPDX-License-Identifier: Apache-2.0
"""Start real workers, each launch under a hard time-out, and leave none behind."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forks import Forked
from run_tests import WHOLE

from agmerge.backends.horovod import SLEEPING

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@dataclass(frozen=True)
class Ended:
    """A launch that has ended. ``code`` is None if it ran into the time-out."""

    code: int | None
    output: str


def environment(**more: str) -> dict[str, str]:
    """This process's environment without anything a launcher may have left, and one thread a worker.

    Of ours it has what tests are run with: which loops, and no plans of the user's own. Horovod's cycle is short: tests
    send thousands of small messages, one after the other. It is no shorter, for other tests have the cores, too, which
    the library does not see: in cycles of 0.1 ms threads that wait do little else than wake up.

    Workers start without torch's compiler, unless ``make test-all`` says WHOLE.
    """
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "HOROVOD", "AGMERGE", "TORCHELASTIC")
    ours = ("AGMERGE_KERNEL",)
    there = {key: os.environ.get(key, "") for key in list(os.environ)}  # pytest changes one while threads launch
    kept = {key: one for key, one in there.items() if not key.startswith(dropped) or key in ours}
    if not os.environ.get(WHOLE):
        kept["PYTHONPATH"] = os.pathsep.join([str(HERE / "quick_start"), *filter(None, [kept.get("PYTHONPATH")])])
    return {**kept, "OMP_NUM_THREADS": "1", "HOROVOD_CYCLE_TIME": "1", **more}


def run(command: Sequence[str], timeout: float, **more: str) -> Ended:
    """Run ``command`` to its end, or kill it and everything it has started after ``timeout`` seconds."""
    process = subprocess.Popen(
        list(command),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(**more),
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
        return Ended(process.returncode, output)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun takes its workers with it
        try:
            output, _ = process.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        return Ended(None, output)


# What starts workers, and the backend that agmerge.init() must then find. ``{n}``: how many.
MPIRUN = "mpirun --allow-run-as-root --oversubscribe --bind-to none -np {n}"
LAUNCHERS = {
    "torchrun": ("python -m torch.distributed.run --standalone --nproc_per_node={n}", "torch"),
    "mpirun": (f"{MPIRUN} python", "horovod"),
    "mpirun, mpi4py": (f"{MPIRUN} -x AGMERGE_BACKEND python", "mpi"),
    "horovodrun, MPI": ("horovodrun -np {n} --mpi python", "horovod"),
    "horovodrun, Gloo": ("horovodrun -np {n} --gloo python", "horovod"),
}


def missing(launcher: str) -> str:
    """Why ``launcher`` cannot be used here; empty if it can."""
    if launcher == "torchrun":
        return ""
    needs = {"mpi": "mpi4py", "horovod": "horovod"}[LAUNCHERS[launcher][1]]
    if importlib.util.find_spec(needs) is None:
        return f"{needs} is not installed; `make test` installs it"
    program = LAUNCHERS[launcher][0].split()[0]
    return "" if shutil.which(program, path=_path()) else f"no {program}; `make test` installs it"


def launch(launcher: str, workers: int, script: Path, *arguments: str, timeout: float, **more: str) -> Ended:
    """``workers`` workers on this machine, started by ``launcher``.

    In torchrun's place ``make test`` forks them, as `torchrun` does not: their imports would take most of its time.
    """
    if launcher == "torchrun" and not os.environ.get(WHOLE):
        return forked(workers, script, *arguments, timeout=timeout, **more)
    command = LAUNCHERS[launcher][0].format(n=workers).split()
    at = command.index("python")
    command[at] = sys.executable
    if launcher == "mpirun, mpi4py":
        more["AGMERGE_BACKEND"] = "mpi"
    elif launcher in ("mpirun", "horovodrun, MPI"):
        more = {**SLEEPING, **more}
    return run([*command, str(script), *arguments], timeout, PATH=_path(), **more)


def _path() -> str:
    """The programs of this environment first: horovodrun looks for mpirun there."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def torchrun(workers: int, script: Path, *arguments: str, timeout: float) -> Ended:
    """``torchrun`` on this machine, at a free port."""
    return launch("torchrun", workers, script, *arguments, timeout=timeout)


def forked(workers: int, script: Path, *arguments: str, timeout: float, **more: str) -> Ended:
    """Workers that are told of each other as torchrun tells them: once one of them has failed, all are ended."""
    common = {"WORLD_SIZE": str(workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": reserved_port(), **more}
    common |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "forked", "TORCHELASTIC_RESTART_COUNT": "0"}
    places = [{"RANK": str(r), "LOCAL_RANK": str(r), "LOCAL_WORLD_SIZE": str(workers)} for r in range(workers)]
    with tempfile.TemporaryFile("a+", encoding="utf-8") as log:
        ranks = [Forked(script, arguments, environment(**common, **place), ROOT, log) for place in places]
        code = _ended(ranks, time.monotonic() + timeout)
        log.seek(0)
        return Ended(code, log.read())


def _ended(ranks: Sequence[Forked], end: float) -> int | None:
    """Wait for all ranks, up to the time ``end``; return 0, the first status of one that has failed, or None."""
    try:
        while time.monotonic() < end:
            codes = [rank.poll() for rank in ranks]
            failed = [code for code in codes if code]
            if failed or None not in codes:
                return failed[0] if failed else 0
            with suppress(subprocess.TimeoutExpired):
                ranks[codes.index(None)].wait(0.05)
        return None
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
        for rank in ranks:
            with suppress(subprocess.TimeoutExpired):
                rank.wait(5.0)
            rank.kill()
            rank.wait()


_reserved: list[socket.socket] = []  # up to the end of this process


def reserved_port() -> str:
    """Return a TCP port that is free, and stays so for seconds, while workers import what they need.

    Linux gives none below 32768 to those that ask for any. Other tests that reserve one find the UDP port of the same
    number taken.
    """
    while True:
        port = 10_000 + secrets.randbelow(10_000)
        mark = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            mark.bind(("127.0.0.1", port))
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            mark.close()
        else:
            _reserved.append(mark)
            return str(port)


def start_by_hand(workers: int, script: Path, *arguments: str, **more: str) -> list[subprocess.Popen[str]]:
    """Workers without a launcher, under way."""
    common = {"WORLD_SIZE": str(workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": reserved_port(), **more}
    return [
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(RANK=str(r), **common),
            cwd=ROOT,
        )
        for r in range(workers)
    ]


def by_hand(workers: int, script: Path, *arguments: str, timeout: float) -> list[Ended]:
    """Workers without a launcher, by ``RANK``, ``WORLD_SIZE`` and ``MASTER_ADDR``, as a job script would."""
    ended = []
    for process in start_by_hand(workers, script, *arguments):
        try:
            output, _ = process.communicate(timeout=timeout)
            ended.append(Ended(process.returncode, output))
        except subprocess.TimeoutExpired:
            process.kill()
            ended.append(Ended(None, process.communicate()[0]))
    return ended


def results(folder: Path, workers: int) -> dict[str, list[Any]]:
    """What the scenarios have written: per scenario, one value a rank (None where a rank wrote nothing)."""
    found: dict[str, list[Any]] = {}
    for path in sorted(folder.glob("*.json")):
        name, rank = path.stem.rsplit(".", 1)
        found.setdefault(name, [None] * workers)[int(rank)] = json.loads(path.read_text())
    return found
