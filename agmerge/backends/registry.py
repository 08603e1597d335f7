# SPDX-License-Identifier: Apache-2.0
"""Table of the backends, and the choice of one by the launcher's variables.

To add a backend, write a module with the names of :class:`BackendModule` and give it a line in ``BACKENDS``. Libraries
are imported when a backend is opened, so all modules can be loaded everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from agmerge.backends import horovod, local, mpi, slurm, staging, torch
from agmerge.backends.base import Backend, Listen
from agmerge.backends.status import ProbeResult, Row
from agmerge.errors import AGMergeError

ALONE = "local"  # the one backend without a launcher: taken if no other is meant


class BackendModule(Protocol):
    """Module of one backend, which moves tensors between processes."""

    # Environment variables in which its launchers say how many workers they have started.
    SIZES: tuple[str, ...]
    # Whether it reads Slurm's variables itself, so that tasks of a plain `srun` find each other.
    READS_SLURM: bool
    # Python that prints one line of JSON about its library, for the doctor; empty: there is nothing to try.
    PROBE: str

    def initialised(self) -> bool:
        """Return whether the script has already set up the library by itself."""

    def workers(self) -> int:
        """Return how many workers the library has that the script has set up."""

    def launched(self, env: Mapping[str, str]) -> bool:
        """Return whether a launcher that means this backend alone has started this process.

        Raises :class:`agmerge.AGMergeError` where only a part of such a launcher's variables is set.
        """

    def can_join(self, env: Mapping[str, str]) -> bool:
        """Return whether this backend is to connect workers of a launcher that means no backend, such as mpirun."""

    def open(self, env: Mapping[str, str], timeout: float, listen: Listen) -> Backend:
        """Collective. Join the other workers, or take the library as the script has initialised it.

        ``env``: the launcher's variables. ``timeout``: seconds, for all of it. ``listen``: exchanges the addresses of
        all ranks; for backends that need them to connect ranks. Raises :class:`agmerge.AGMergeError` with what to
        do where the library is missing.
        """

    def diagnose(self, probe: ProbeResult, python: str, mpirun: str) -> Row:
        """Return the doctor's row: whether this backend works here, and the command that mends it if not.

        ``probe``: what ``PROBE`` found. ``python``: this interpreter, as it is typed in a shell. ``mpirun``: the
        version that mpirun prints; empty where there is none.
        """


# In the order in which they are asked: the first one wins where several apply.
BACKENDS: dict[str, BackendModule] = {"horovod": horovod, "torch": torch, "mpi": mpi, ALONE: local}


def initialised() -> str | None:
    """Return the backend of which the script has initialised the library by itself; None if there is none."""
    return next((name for name, backend in BACKENDS.items() if backend.initialised()), None)


def inherits() -> bool:
    """Return whether this process was forked from one with a process group of torch's, and has no other one."""
    return torch.inherits()


def detect(env: Mapping[str, str]) -> str:
    """Return the name of the backend to open when the script names none.

    In this order: a Horovod or torch.distributed that the script has initialised; ``AGMERGE_BACKEND``;
    horovodrun's variables; torchrun's, also when set by hand; an MPI launcher's (Horovod if it is here and
    built with MPI, else mpi4py); srun's where it has started several tasks (torch); else ``local``. Raises
    :class:`agmerge.AGMergeError` where a launcher says how many workers there are, but not which one this is.
    """
    chosen = initialised() or env.get("AGMERGE_BACKEND")
    if chosen:
        return chosen
    launched = (name for name, backend in BACKENDS.items() if backend.launched(env))
    joinable = (name for name, backend in BACKENDS.items() if backend.can_join(env))
    found = next(launched, None) or next(joinable, None)
    variable = size_variable(env, ALONE)
    if found is None and variable is not None:
        raise AGMergeError(
            f"AGM005: {variable}={env[variable]}, but no variable sets the rank of this process. Launch with "
            "torchrun, horovodrun, mpirun or srun, or set AGMERGE_BACKEND=local to train with one worker."
        )
    return found or ALONE


def open_backend(name: str, env: Mapping[str, str], timeout: float, listen: Listen) -> Backend:
    """Collective. Join the other workers by the backend ``name``, so that tensors of any device can be exchanged.

    The other arguments, and errors, as those of :meth:`BackendModule.open`.
    """
    return staging.staged(BACKENDS[name].open(env, timeout, listen))


def has_launcher(env: Mapping[str, str]) -> bool:
    """Return whether a launcher has started this process, one of any number of workers."""
    return any(name in env for name in _sizes()) or slurm.launched(env)


def size_variable(env: Mapping[str, str], backend: str) -> str | None:
    """Return the name of a variable in which a launcher says that it has started several workers; None: it has not.

    ``backend``: the name of the one that is asked to connect them.
    """
    several = next((name for name in _sizes() if int(env.get(name) or 1) > 1), None)
    if several is None and not BACKENDS[backend].READS_SLURM and slurm.launched(env):
        return slurm.SIZE
    return several


def _sizes() -> dict[str, None]:
    """Return the names of the variables in which launchers say how many workers there are, in the backends' order."""
    return dict.fromkeys(name for module in BACKENDS.values() for name in module.SIZES)
