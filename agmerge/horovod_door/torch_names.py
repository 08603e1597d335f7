# SPDX-License-Identifier: Apache-2.0
"""Names of ``horovod.torch``, but for its optimizer and its batch norm."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import agmerge
from agmerge import Adasum, Average, Max, Min, ProcessSet, Product, Sum, global_process_set
from agmerge import barrier as _barrier
from agmerge.backends import registry
from agmerge.backends.torch import built
from agmerge.errors import NoAnswer as HorovodInternalError
from agmerge.horovod_door import by_name
from agmerge.horovod_door.by_name import calls, poll, synchronize
from agmerge.horovod_door.compression import Compression
from agmerge.horovod_door.timeline import start_timeline, stop_timeline, timed
from agmerge.runtime import workers

VERSION = "0.28.1"  # the release of Horovod whose names these are: scripts compare it
MIN_WORKERS = "AGMERGE_MIN_WORKERS"  # set by the launcher of an elastic job

# Workers.

NOT_ALL = (
    "hvd.init(comm={comm!r}) is not supported: all workers of the launcher take part. For some of them, use "
    "hvd.add_process_set([...]) after hvd.init()."
)


@dataclass(frozen=True)
class _Place:
    """Place of this worker among the machines of the job, as Horovod counts them."""

    cross_rank: int = 0
    cross_size: int = 1
    is_homogeneous: bool = True


_place = _Place()  # written by settle alone


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Collective. Connect to the other workers, once.

    Args:
        comm: None or all ranks. Others raise ``ValueError``.
        process_sets: sets to be added at once; ``"dynamic"`` for none.
    """
    if workers.is_initialized():
        return
    least = os.environ.get(MIN_WORKERS)
    if least:
        agmerge.init(elastic=agmerge.Elastic(min_workers=int(least), survives=False))
    else:
        agmerge.init(_backend(os.environ))
    if not (comm is None or (isinstance(comm, Sequence) and list(comm) in ([], list(range(agmerge.size()))))):
        raise ValueError(NOT_ALL.format(comm=comm))
    settle()
    for process_set in [] if isinstance(process_sets, str) else process_sets or []:
        agmerge.add_process_set(process_set)
    path = os.environ.get("HOROVOD_TIMELINE", "DYNAMIC")
    if path != "DYNAMIC":
        start_timeline(path, os.environ.get("HOROVOD_TIMELINE_MARK_CYCLES") == "1")


def _backend(env: Mapping[str, str]) -> str | None:
    """Return the name of the backend, never Horovod's, which these names stand for; None: as the user has chosen."""
    if env.get("AGMERGE_BACKEND"):
        return None
    backends = {name: module for name, module in registry.BACKENDS.items() if name != "horovod"}
    tests: tuple[Callable[[Any], bool], ...] = (
        lambda module: module.initialised(), lambda module: module.launched(env), lambda module: module.can_join(env),
    )  # fmt: skip
    return next((name for test in tests for name, module in backends.items() if test(module)), registry.ALONE)


def settle() -> None:
    """Collective. Find out how the present workers share machines."""
    global _place
    calls.clear()
    rows = agmerge.allgather_object((agmerge.local_rank(), agmerge.local_size()))
    beside = [rank for rank, (local, _) in enumerate(rows) if local == agmerge.local_rank()]
    _place = _Place(beside.index(agmerge.rank()), len(beside), len({size for _, size in rows}) == 1)


def shutdown() -> None:
    """Leave the other workers. ``init`` may be called again."""
    stop_timeline()
    calls.clear()
    agmerge.shutdown()


is_initialized, rank, size = agmerge.is_initialized, agmerge.rank, agmerge.size
local_rank, local_size = agmerge.local_rank, agmerge.local_size


def cross_rank() -> int:
    """Return this worker's number among those with its local rank, one on each machine."""
    agmerge.rank()  # raises before init()
    return _place.cross_rank


def cross_size() -> int:
    """Return the number of machines with a worker of this one's local rank."""
    agmerge.rank()
    return _place.cross_size


def is_homogeneous() -> bool:
    """Return whether all machines have the same number of workers."""
    agmerge.rank()
    return _place.is_homogeneous


# What is there to communicate with: of the library that moves tensors here, not of a Horovod.


def mpi_threads_supported() -> bool:
    """Return whether MPI moves tensors, from several threads."""
    return mpi_enabled()


def mpi_enabled() -> bool:
    """Return whether MPI moves tensors in this job."""
    return agmerge.backend_name() == "mpi"


def mpi_built(verbose: bool = False) -> bool:
    """Return whether MPI can move tensors here: mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def gloo_enabled() -> bool:
    """Return whether Gloo moves tensors of the CPU in this job."""
    return agmerge.backend_name() == "torch"


def gloo_built(verbose: bool = False) -> bool:
    """Return whether torch has Gloo."""
    return "gloo" in built()


def nccl_built(verbose: bool = False) -> int:
    """Return the number of the NCCL in torch, such as 22703, which moves tensors of GPUs; 0 where there is none."""
    if "nccl" not in built() or not torch.cuda.is_available():
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]
    return 10_000 * int(major) + 100 * int(minor) + int(patch)


def cuda_built() -> bool:
    """Return whether torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether torch was built for ROCm."""
    return torch.version.hip is not None


def ddl_built(verbose: bool = False) -> bool:
    """Return False: IBM's DDL is not used."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """Return False: Intel's oneCCL is not used."""
    return False


def gpu_available(ext_base_name: str = "torch", verbose: bool = False) -> bool:
    """Return whether torch sees a GPU."""
    return torch.cuda.is_available()


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number of ranks is a power of 2."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


# Collectives. Those of a tensor are agmerge's; asynchronous ones are matched by their names.


def _later(kind: str, call: Callable[..., Any], named: Callable[..., Any]) -> Callable[..., by_name.Waiting]:
    """Return an asynchronous call that waits for its turn.

    ``kind``: the name of the collective. ``call``: agmerge's. ``named``: returns the script's name for it, from the
    arguments.
    """

    def started(*arguments: Any, **options: Any) -> by_name.Waiting:
        name, learns = named(*arguments, **options), torch.is_grad_enabled()

        def start() -> Any:
            with torch.set_grad_enabled(learns):  # as it is now
                return timed(kind, name, call)(*arguments, **options)

        return calls.add(kind, name, start)

    started.__doc__ = call.__doc__
    return started


def _second(_: Any, name: str | None = None, *__: Any, **___: Any) -> str | None:
    return name


def _third(_: Any, __: Any = None, name: str | None = None, *___: Any, **____: Any) -> str | None:
    return name


def _now(kind: str, call: Callable[..., Any], named: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective that the timeline records. The arguments are those of :func:`_later`."""

    def made(*arguments: Any, **options: Any) -> Any:
        return timed(kind, named(*arguments, **options), call)(*arguments, **options)

    made.__doc__ = call.__doc__
    return made


allreduce, allreduce_ = (_now("allreduce", call, _third) for call in (agmerge.allreduce, agmerge.allreduce_))
allreduce_async = _later("allreduce", agmerge.allreduce_async, _third)
allreduce_async_ = _later("allreduce", agmerge.allreduce_async_, _third)
grouped_allreduce = _now("allreduce", agmerge.grouped_allreduce, _third)
grouped_allreduce_ = _now("allreduce", agmerge.grouped_allreduce_, _third)
grouped_allreduce_async = _later("allreduce", agmerge.grouped_allreduce_async, _third)
grouped_allreduce_async_ = _later("allreduce", agmerge.grouped_allreduce_async_, _third)
allgather = _now("allgather", agmerge.allgather, _second)
allgather_async = _later("allgather", agmerge.allgather_async, _second)
grouped_allgather = _now("allgather", agmerge.grouped_allgather, _second)
grouped_allgather_async = _later("allgather", agmerge.grouped_allgather_async, _second)
broadcast, broadcast_ = (_now("broadcast", call, _third) for call in (agmerge.broadcast, agmerge.broadcast_))
broadcast_async = _later("broadcast", agmerge.broadcast_async, _third)
broadcast_async_ = _later("broadcast", agmerge.broadcast_async_, _third)
alltoall = _now("alltoall", agmerge.alltoall, _third)
alltoall_async = _later("alltoall", agmerge.alltoall_async, _third)
reducescatter = _now("reducescatter", agmerge.reducescatter, _second)
reducescatter_async = _later("reducescatter", agmerge.reducescatter_async, _second)
grouped_reducescatter = _now("reducescatter", agmerge.grouped_reducescatter, _second)
grouped_reducescatter_async = _later("reducescatter", agmerge.grouped_reducescatter_async, _second)
barrier = _now("barrier", _barrier, lambda *_, **__: None)
join, sparse_allreduce_async = agmerge.join, agmerge.sparse_allreduce_async
allgather_object, broadcast_object = agmerge.allgather_object, agmerge.broadcast_object
broadcast_parameters = agmerge.broadcast_parameters
broadcast_optimizer_state = agmerge.broadcast_optimizer_state
add_process_set, remove_process_set = agmerge.add_process_set, agmerge.remove_process_set

# fmt: off
__all__ = [
    "Adasum", "Average", "Compression", "HorovodInternalError", "Max", "Min", "ProcessSet", "Product", "Sum",
    "add_process_set", "allgather", "allgather_async", "allgather_object", "allreduce", "allreduce_",
    "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async", "barrier", "broadcast", "broadcast_",
    "broadcast_async", "broadcast_async_", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters",
    "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "global_process_set", "gloo_built",
    "gloo_enabled", "gpu_available", "grouped_allgather", "grouped_allgather_async", "grouped_allreduce",
    "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter",
    "grouped_reducescatter_async", "init", "is_homogeneous", "is_initialized", "join", "local_rank", "local_size",
    "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built", "num_rank_is_power_2", "poll", "rank",
    "reducescatter", "reducescatter_async", "remove_process_set", "rocm_built", "shutdown", "size",
    "sparse_allreduce_async", "start_timeline", "stop_timeline", "synchronize",
]
# fmt: on
