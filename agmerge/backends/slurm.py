# SPDX-License-Identifier: Apache-2.0
"""Translate Slurm's variables to torchrun's, for tasks that ``srun`` has started without another launcher.

Only those of the step count (``SLURM_STEP_...``): a plain process in the shell of ``salloc`` or ``sbatch`` is alone,
whatever the job has.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping

from agmerge.errors import AGMergeError

SIZE = "SLURM_STEP_NUM_TASKS"  # the variable that says how many tasks the step has
FIRST, PORTS = 20_000, 12_000  # MASTER_PORT is one of these: below those that Linux hands out by itself
INSTEAD = (
    "Launch with `srun --ntasks-per-node=1 torchrun --nnodes=$SLURM_NNODES ... script.py`, or set RANK, WORLD_SIZE "
    "and MASTER_ADDR for each task. With AGMERGE_BACKEND=local, each task trains alone"
)


def launched(env: Mapping[str, str]) -> bool:
    """Return whether this process is one of several tasks of a step."""
    return tasks(env) > 1


def tasks(env: Mapping[str, str]) -> int:
    """Return how many tasks the step has that this process is in; 1 outside of steps."""
    text = env.get(SIZE) or "1"
    return int(text) if text.isdigit() else 1


def variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torchrun would have set: rank, size, place on the node, and where rank 0 is.

    The port follows from the number of job and step, so that two steps on one node do not meet. Raises
    :class:`agmerge.AGMergeError` with what to do where Slurm has not said enough: never a group of one.
    """
    try:
        counts = list(_counts(env["SLURM_STEP_TASKS_PER_NODE"]))
        torchruns = {
            "RANK": str(int(env["SLURM_PROCID"])),
            "WORLD_SIZE": str(tasks(env)),
            "LOCAL_RANK": str(int(env["SLURM_LOCALID"])),
            "LOCAL_WORLD_SIZE": str(counts[int(env["SLURM_NODEID"])]),
            "MASTER_ADDR": env.get("MASTER_ADDR") or hosts(env["SLURM_STEP_NODELIST"])[0],
        }
    except (KeyError, ValueError, IndexError) as error:
        raise AGMergeError(
            f"AGM005: srun started {tasks(env)} tasks (SLURM_STEP_NUM_TASKS), but its variables do not contain their "
            f"addresses ({type(error).__name__}: {error}). {INSTEAD}"
        ) from error
    step = f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}".encode()
    return {**torchruns, "MASTER_PORT": env.get("MASTER_PORT") or str(FIRST + zlib.crc32(step) % PORTS)}


def hosts(listed: str) -> list[str]:
    """Return the names in one of Slurm's lists: ``"a[1-2,07],b"`` is a1, a2, a07, b.

    Raises ``ValueError`` for any other text.
    """
    names = [name for part in _parts(listed) for name in _expanded(part)]
    if not all(names) or not names:
        raise ValueError(f"a list of hosts with an empty name: {listed!r}")
    return names


def _parts(listed: str) -> list[str]:
    """Split at the commas that are not in brackets."""
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", listed)
    if ",".join(parts) != listed:
        raise ValueError(f"not a list of hosts: {listed!r}")
    return parts


def _expanded(part: str) -> Iterator[str]:
    """Yield all names of one entry of a list; several brackets multiply."""
    before, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    inside, _, after = rest.partition("]")
    for part_range in inside.split(","):
        low, dash, high = part_range.partition("-")
        for number in range(int(low), int(high if dash else low) + 1):
            for end in _expanded(after):
                yield f"{before}{number:0{len(low)}d}{end}"


def _counts(listed: str) -> Iterator[int]:
    """Yield the number of tasks on each node: ``"4(x2),1"`` is 4, 4, 1."""
    for part in listed.split(","):
        count, _, times = part.partition("(x")
        yield from [int(count)] * int(times.rstrip(")") or 1)
