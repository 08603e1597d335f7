# SPDX-License-Identifier: Apache-2.0
"""Names of ``horovod.torch``, but for its optimizer and its batch norm."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import agmerge
from agmerge.backends import registry
from agmerge.backends.torch import built
from agmerge.horovod_door import by_name
from agmerge.horovod_door.by_name import poll, synchronize
from agmerge.horovod_door.compression import Compression
from agmerge.horovod_door.timeline import start_timeline, stop_timeline, timed
from agmerge.runtime import workers

VERSION = "0.28.1"  # the release of Horovod whose names these are: scripts compare it
# Set by the launcher of an elastic job.
MIN_WORKERS, FIRST_WORKERS = "AGMERGE_MIN_WORKERS", "AGMERGE_FIRST_WORKERS"

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
        first = int(os.environ.get(FIRST_WORKERS, least))
        agmerge.init(elastic=agmerge.Elastic(min_workers=int(least), survives=False, first_workers=first))
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
    by_name.clear()
    rows = agmerge.allgather_object((agmerge.local_rank(), agmerge.local_size()))
    beside = [rank for rank, (local, _) in enumerate(rows) if local == agmerge.local_rank()]
    _place = _Place(beside.index(agmerge.rank()), len(beside), len({size for _, size in rows}) == 1)


def shutdown() -> None:
    """Leave the other workers. ``init`` may be called again."""
    stop_timeline()
    by_name.clear()
    agmerge.shutdown()


def _known() -> _Place:
    """Return the place of this worker. Raises before :func:`init`."""
    agmerge.rank()
    return _place


def _answering(answer: Callable[[], Any]) -> Callable[..., Any]:
    """Return ``answer`` as a function that takes Horovod's ``verbose`` and has no use for it."""
    return lambda *_, **__: answer()


def nccl_built(verbose: bool = False) -> int:
    """Return the number of the NCCL in torch, such as 22703, which moves tensors of GPUs; 0 where there is none."""
    if "nccl" not in built() or not torch.cuda.is_available():
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]
    return 10_000 * int(major) + 100 * int(minor) + int(patch)


# Collectives. Those of a tensor are agmerge's, recorded by the timeline. Asynchronous ones are matched by their names.


def _called(name: str) -> Callable[..., Any]:
    """Return a collective of agmerge's of this name, for scripts."""
    call, kind = getattr(agmerge, name), name.removeprefix("grouped_").partition("_")[0]
    signature = inspect.signature(call)

    def called(*arguments: Any, **options: Any) -> Any:
        given = signature.bind(*arguments, **options).arguments.get("name")
        if "_async" not in name:
            return timed(kind, given, call)(*arguments, **options)
        learns = torch.is_grad_enabled()

        def start() -> Any:
            with torch.set_grad_enabled(learns):  # as it is now
                return timed(kind, given, call)(*arguments, **options)

        return by_name.add(kind, given, start)

    return functools.wraps(call)(called)


OWN = """
    allgather allgather_async allreduce allreduce_ allreduce_async allreduce_async_ alltoall alltoall_async barrier
    broadcast broadcast_ broadcast_async broadcast_async_ grouped_allgather grouped_allgather_async grouped_allreduce
    grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter
    grouped_reducescatter_async reducescatter reducescatter_async
"""
SAME = """
    Adasum Average Max Min ProcessSet Product Sum add_process_set allgather_object broadcast_object
    broadcast_optimizer_state broadcast_parameters global_process_set is_initialized local_rank local_size rank
    remove_process_set size sparse_allreduce_async
"""
NAMES: dict[str, Any] = {
    **{name: _called(name) for name in OWN.split()},
    **{name: getattr(agmerge, name) for name in SAME.split()},
    **{"Compression": Compression, "HorovodInternalError": agmerge.NoAnswer, "poll": poll, "synchronize": synchronize},
    **{"init": init, "shutdown": shutdown, "start_timeline": start_timeline, "stop_timeline": stop_timeline},
    "cross_rank": lambda: _known().cross_rank,
    "cross_size": lambda: _known().cross_size,
    "is_homogeneous": lambda: _known().is_homogeneous,
    # What is there to communicate with: of the library that moves tensors here, not of a Horovod.
    **dict.fromkeys(("mpi_enabled", "mpi_threads_supported"), _answering(lambda: agmerge.backend_name() == "mpi")),
    "mpi_built": _answering(lambda: importlib.util.find_spec("mpi4py") is not None),
    "gloo_enabled": _answering(lambda: agmerge.backend_name() == "torch"),
    "gloo_built": _answering(lambda: "gloo" in built()),
    "nccl_built": nccl_built,
    "cuda_built": _answering(lambda: torch.version.cuda is not None),
    "rocm_built": _answering(lambda: torch.version.hip is not None),
    **dict.fromkeys(("ccl_built", "ddl_built"), _answering(lambda: False)),
    "gpu_available": _answering(torch.cuda.is_available),
}
