"""Which backend this process, or this thread of an in-memory group, talks through."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

from agmerge.backends import Backend, local
from agmerge.backends import torch as torch_backend
from agmerge.errors import AGMergeError

BACKENDS = ("torch", "local")
_NOT_BUILT = ("horovod", "mpi")
_LAUNCHERS = {
    "HOROVOD_RANK": "horovodrun",
    "OMPI_COMM_WORLD_RANK": "Open MPI's mpirun",
    "PMI_RANK": "an MPI launcher",
    "PMIX_RANK": "an MPI launcher",
}
INIT_TIMEOUT = 300.0

_process: Backend | None = None
_thread = threading.local()


def detect(env: Mapping[str, str]) -> str:
    """The backend to open when the script names none.

    An initialised torch.distributed, then ``AGMERGE_BACKEND``, then the launcher's variables, else ``local``.
    """
    if torch_backend.initialised():
        return "torch"
    if env.get("AGMERGE_BACKEND"):
        return env["AGMERGE_BACKEND"]
    if torch_backend.launched(env):
        return "torch"
    if int(env.get("WORLD_SIZE") or 1) > 1:
        missing = [key for key in ("RANK", "MASTER_ADDR") if key not in env]
        raise AGMergeError(
            f"WORLD_SIZE={env['WORLD_SIZE']}, but {' and '.join(missing)} not set; set them too, or launch with "
            "torchrun"
        )
    for variable, launcher in _LAUNCHERS.items():
        if variable in env:
            # Falling back to `local` would train as many unrelated models as there are workers.
            raise AGMergeError(
                f"this worker was started by {launcher} ({variable}={env[variable]}), whose backend is not "
                "built yet; launch with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each "
                "worker"
            )
    return "local"


def init(backend: str | None = None) -> None:
    """Join the other workers.

    ``backend``: ``"torch"`` or ``"local"`` (this process alone); None: detected, see :func:`detect`.
    A second call is allowed and does nothing. Raises ``ValueError`` for an unknown or other backend.
    """
    global _process
    if is_initialized():
        if backend not in (None, backend_name()):
            raise ValueError(
                f"init(backend={backend!r}): already initialised with {backend_name()!r}; call shutdown() first"
            )
        return
    env = os.environ
    if env.get("HOROVOD_ELASTIC") == "1":
        raise AGMergeError(
            "HOROVOD_ELASTIC=1: elastic training is not built yet; launch with a fixed number of workers"
        )
    name = backend or detect(env)
    if name in _NOT_BUILT:
        raise ValueError(f"backend {name!r} is not built yet; backends: {', '.join(BACKENDS)}")
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; backends: {', '.join(BACKENDS)}")
    _process = torch_backend.open(env, INIT_TIMEOUT) if name == "torch" else local.open()


def shutdown() -> None:
    """Leave the group. Nothing but :func:`init` may be called afterwards."""
    global _process
    if _process is not None and bound() is None:
        _process.close()
        _process = None


def bind(backend: Backend | None) -> None:
    """Make ``backend`` this thread's own (None: the process's again). For in-memory groups."""
    _thread.backend = backend


def bound() -> Backend | None:
    """This thread's own backend, if it has one."""
    return getattr(_thread, "backend", None)


def world() -> Backend:
    """The communicator of all workers, for module-level collectives. Raises if there is none yet."""
    backend = bound() or _process
    if backend is None:
        raise AGMergeError("AGMerge has not been initialized; use agmerge.init().")
    return backend


def is_initialized() -> bool:
    """Whether :func:`init` has been called."""
    return (bound() or _process) is not None


def backend_name() -> str:
    """``"torch"`` or ``"local"``."""
    return world().name


def rank() -> int:
    """This worker's number, 0 to ``size() - 1``."""
    return world().rank


def size() -> int:
    """How many workers there are."""
    return world().size


def local_rank() -> int:
    """This worker's number among those on the same machine."""
    return world().local_rank


def local_size() -> int:
    """How many workers there are on this machine."""
    return world().local_size
