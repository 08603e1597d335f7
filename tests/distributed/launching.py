"""Start real workers, each launch under a hard time-out, and leave none behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@dataclass(frozen=True)
class Ended:
    """A launch that has ended. ``code`` is None if it ran into the time-out."""

    code: int | None
    output: str


def environment(**more: str) -> dict[str, str]:
    """This process's environment without anything a launcher may have left, and one thread a worker."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "HOROVOD", "AGMERGE", "TORCHELASTIC")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


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


def torchrun(workers: int, script: Path, *arguments: str, timeout: float) -> Ended:
    """``torchrun`` on this machine, at a free port."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={workers}"]
    return run([*launcher, str(script), *arguments], timeout)


def by_hand(workers: int, script: Path, *arguments: str, timeout: float) -> list[Ended]:
    """Workers without a launcher, by ``RANK``, ``WORLD_SIZE`` and ``MASTER_ADDR``, as a job script would."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(RANK=str(r), WORLD_SIZE=str(workers), MASTER_ADDR="127.0.0.1", MASTER_PORT=port),
            cwd=ROOT,
        )
        for r in range(workers)
    ]
    ended = []
    for process in processes:
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
