# SPDX-License-Identifier: Apache-2.0
"""Tell which launcher has started a worker; ``commands.py`` has the commands. The standard library alone is asked."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

SHOWN_BY = {  # the variables that launchers leave, the surest first
    "HOROVOD_RANK": "horovodrun",
    "TORCHELASTIC_RUN_ID": "torchrun",
    "OMPI_COMM_WORLD_RANK": "mpirun",
    "PMI_RANK": "mpirun",
    "PMIX_RANK": "mpirun",
    "RANK": "by hand",
    "SLURM_STEP_NUM_TASKS": "slurm",
}
HOROVODS = ("--tag-output", "^openib")  # what horovodrun gives to the mpirun that it turns into


def launcher(env: Mapping[str, str] = os.environ, above: Iterable[str] | None = None) -> str:
    """Return what has started this worker, by the variables that it leaves; nothing: it is alone.

    horovodrun over MPI leaves mpirun's only, and turns into it: it is told by ``above``, the commands that this process
    descends from.
    """
    name = next((name for key, name in SHOWN_BY.items() if key in env), "alone")
    if name == "mpirun":
        commands = ancestors() if above is None else above
        if any(all(word in command for word in HOROVODS) for command in commands):
            return "horovodrun"
    return name


def ancestors() -> Iterator[str]:
    """Yield the commands that this process descends from, the nearest first (Linux; elsewhere none)."""
    process = os.getppid()
    with contextlib.suppress(OSError):
        while process > 1:
            here = Path("/proc") / str(process)
            yield (here / "cmdline").read_text(errors="replace").replace("\0", " ").strip()
            process = int((here / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
