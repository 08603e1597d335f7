"""Have Horovod's thread sleep while it waits in Open MPI, where workers have no cores to spare for that.

All that MPI offers to wait for a message is to look for it over and over. Horovod's thread is in MPI for much of the
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
ON_THIS_HOST = "OMPI_COMM_WORLD_LOCAL_SIZE"  # what Open MPI's launcher calls the number of workers here


def waiting(env: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return how Open MPI is to wait, as variables for ``hvd.init()``; none where there is a core for all who wait.

    ``env``: of this process; none where Open MPI's launcher has not started it. ``threads``: with which each worker
    trains; Horovod's is one more.
    """
    crowded = int(env.get(ON_THIS_HOST, "0")) * (threads + 1) > cores()
    return dict(SLEEPING) if crowded else {}


def advice(env: Mapping[str, str], threads: int) -> str:
    """Return what a user should hear whose script has called ``hvd.init()`` too early for us; empty: nothing."""
    unset = [f"{name}={value}" for name, value in waiting(env, threads).items() if name not in env]
    if not unset:
        return ""
    return (
        "the script has called hvd.init() by itself, on a host with fewer cores than its workers have threads: while "
        "Horovod waits in Open MPI, it takes a core from training. Call agmerge.init() instead, or before, or start "
        f"workers with {' '.join(unset)}"
    )


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
