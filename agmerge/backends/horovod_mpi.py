# SPDX-License-Identifier: Apache-2.0
"""Make Horovod's thread sleep while it waits in Open MPI, where workers have no cores to spare for that.

MPI waits for a message by polling alone. Horovod's thread is in MPI for much of the
time, and takes a whole core meanwhile: a trainer's, unless there is one for it. ``sched_yield``, which Open MPI can
call between two looks, is no cure: the thread is always ready to run, so the kernel may put both trainers on one core
and both threads that wait on another, and leave them there. Sleeping is (docs/backends.md).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

# Open MPI 5 sleeps between two looks, for so many nanoseconds and the 50 microseconds of the kernel's timers. Open
# MPI 4 knows the first of these alone, and yields.
SLEEPING = {
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_threads_pthreads_yield_strategy": "nanosleep",
    "OMPI_MCA_threads_pthreads_nanosleep_time": "300000",
}
ON_THIS_HOST = "OMPI_COMM_WORLD_LOCAL_SIZE"  # Open MPI's variable of the number of workers here


def waiting(env: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return settings by which Open MPI's waits sleep, as variables for ``hvd.init()``; {} where cores suffice.

    ``env``: of this process; {} where Open MPI's launcher has not started it. ``threads``: with which each worker
    trains; Horovod's is one more.
    """
    crowded = int(env.get(ON_THIS_HOST, "0")) * (threads + 1) > cores()
    return dict(SLEEPING) if crowded else {}


def thread_advice(env: Mapping[str, str], threads: int) -> str:
    """Return advice for a script that has called ``hvd.init()`` too early for these settings; empty: none."""
    unset = [f"{name}={value}" for name, value in waiting(env, threads).items() if name not in env]
    if not unset:
        return ""
    return (
        "AGM709: The script called hvd.init() itself, on a host with fewer cores than its workers have threads. "
        "Horovod waits in Open MPI, which takes a core from training. Call agmerge.init() instead or before, or start "
        f"workers with {' '.join(unset)}"
    )


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
