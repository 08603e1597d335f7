# SPDX-License-Identifier: Apache-2.0
"""Horovod as a backend: NCCL for tensors on a GPU (that has not run yet), MPI or Gloo for those on the CPU.

Horovod matches calls by name, so every communicator puts its own prefix in front of stable names. Of a GPU's tensor it
notes, on the thread and in the stream of the call, when it is ready, so calls are made where that stream is current. A
build without NCCL is given tensors of the CPU alone (see staging): its own copies go through pageable memory.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from agmerge.backends import mpi, status, timeouts
from agmerge.backends.base import Backend, Handle, Listen, matched
from agmerge.backends.status import ProbeResult, Row, built_in
from agmerge.errors import AGMergeError, CollectiveTimeout, NoAnswer, PeerLost, RankMismatchError

# Horovod's elastic training: what its ``TorchState`` saves of ours, and a lost worker as it knows one.


def register(kind: type[Any], handler: type[Any]) -> None:
    """Register ``handler(value)`` for objects of ``kind`` in Horovod's ``TorchState``, before its own handlers."""
    from horovod.torch.elastic import state

    registry = state.get_handler_registry()
    if not any(known is kind for known, _ in registry):
        state.set_handler_registry([(kind, handler), *registry])


def as_lost_worker(text: str, words: str) -> PeerLost:
    """Return a :class:`agmerge.PeerLost` that ``hvd.elastic.run`` knows too: it restores, and goes on with fewer.

    ``text``: ours. ``words``: Horovod's own.
    """
    from horovod.common.exceptions import HorovodInternalError

    kind = type("PeerLost", (PeerLost, HorovodInternalError), {"__module__": PeerLost.__module__})
    error: PeerLost = kind(text, words)
    return error


# Waits of Horovod's thread, which sleeps in Open MPI where workers have no cores to spare.
#
# MPI waits for a message by polling alone. Horovod's thread is in MPI for much of the time, and takes a whole core
# meanwhile: a trainer's, unless there is one for it. ``sched_yield``, which Open MPI can call between two looks, is no
# cure: the thread is always ready to run, so the kernel may put both trainers on one core and both threads that wait on
# another, and leave them there. Sleeping is (docs/backends.md).

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


# The backend.

SIZES: tuple[str, ...] = ("HOROVOD_SIZE", *mpi.SIZES)
READS_SLURM = False
PROBE = """
import json, horovod, horovod.torch as hvd
print(json.dumps({"version": horovod.__version__, "mpi": bool(hvd.mpi_built()), "gloo": bool(hvd.gloo_built()),
                  "nccl": bool(hvd.nccl_built())}))
"""
# Set before hvd.init() unless the user has set them. Merging is ours: Horovod's own fusion depends on timing,
# and so do the bits it gives. A message lies for half a cycle (milliseconds) before it leaves, but in each cycle all
# workers wake and talk: where every core trains, short ones cost more than they save (docs/from_horovod.md).
SETTINGS = {"HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_CYCLE_TIME": "5", "HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
ON_DEVICES = {**SETTINGS, "HOROVOD_CYCLE_TIME": "1"}  # cores are idle there while a GPU trains
STARTING = (
    "Check that each worker was started, and that workers can reach each other. HOROVOD_GLOO_IFACE=<interface> sets "
    "the network for horovodrun --gloo, --network-interfaces for horovodrun, and AGMERGE_TIMEOUT a longer timeout"
)
SHORTEST, LONGEST = 2e-5, 1e-3  # seconds between two looks at a handle


def initialised() -> bool:
    """Return whether the script has already called ``hvd.init()``."""
    hvd = sys.modules.get("horovod.torch")
    return hvd is not None and bool(hvd.is_initialized())


def workers() -> int:
    """Return how many workers the Horovod has that the script has initialised."""
    return int(sys.modules["horovod.torch"].size())


def launched(env: Mapping[str, str]) -> bool:
    """Return whether horovodrun has started this process."""
    return "HOROVOD_RANK" in env


def can_join(env: Mapping[str, str]) -> bool:
    """Return whether an MPI launcher has started this process, and Horovod can use it."""
    return mpi.started_by_mpi(env) and has_mpi()


def has_mpi() -> bool:
    """Return whether Horovod's torch part is here, loads, and was built with MPI."""
    try:
        import horovod.torch as hvd
    except Exception:  # a broken build fails in many ways
        return False
    return bool(hvd.mpi_built())


def open(env: Mapping[str, str], timeout: float, listen: Listen) -> HorovodBackend:
    """Collective. Initialise Horovod, or take it as the script has initialised it.

    ``env`` says which launcher to give advice about. ``listen`` is not needed: Horovod connects its ranks by itself.
    ``timeout``: seconds. Raises :class:`agmerge.AGMergeError` if Horovod is missing or does not load.
    """
    try:
        import horovod.torch as hvd
    except Exception as error:
        anew = _anew(str(error))
        raise AGMergeError(
            f"AGM003: backend='horovod' requires Horovod with its torch part ({error}). Run `python -m agmerge "
            f"build-horovod{anew}`, which builds it for the installed torch. `python -m agmerge doctor` shows the "
            "available backends."
        ) from error
    owned = not hvd.is_initialized()
    trains_here = not torch.cuda.is_available()
    threads = torch.get_num_threads() if trains_here else 1
    if owned:
        settings = {**(SETTINGS if trains_here else ON_DEVICES), **waiting(os.environ, threads)}
        for name, value in settings.items():
            os.environ.setdefault(name, value)
        timeouts.bounded(lambda: _init(hvd), timeout, "init()", STARTING if launched(env) else mpi.STARTING)
    elif hvd.rank() == 0 and (advice := thread_advice(os.environ, threads)):
        warnings.warn(advice, stacklevel=2)
    return HorovodBackend(hvd, None, "agmerge", owned=owned)


def diagnose(probe: ProbeResult, python: str, mpirun: str) -> Row:
    """Return the doctor's row of this backend, see :class:`agmerge.backends.registry.BackendModule`."""
    if probe.error:
        return Row("backend", "horovod", False, probe.error, f"{python} -m agmerge build-horovod{_anew(probe.error)}")
    return Row("backend", "horovod", True, f"Horovod {probe.facts['version']}: {built_in(probe.facts)}")


def _anew(error: str) -> str:
    """Return the flag of build-horovod after that error of importing it: a broken wheel may be the one in the cache."""
    return "" if "No module named 'horovod'" in error else " --force"


def _init(hvd: Any) -> None:
    """Initialise Horovod, with our errors."""
    with _translated("init()"):
        hvd.init()


@contextmanager
def _translated(name: str) -> Iterator[None]:
    """Turn Horovod's errors into ours, also those of the calls that only hand a tensor in."""
    try:
        yield
    except RuntimeError as error:
        if "Mismatched" in str(error):
            raise RankMismatchError(f"AGM101: {name}: {error}") from error
        raise as_lost_worker(f"AGM206: {name}: the exchange with the other ranks failed", str(error)) from error
    except ValueError as error:
        if "same name as another tensor" not in str(error):
            raise
        raise PeerLost(
            f"AGM206: {name}: an earlier call of this name never completed, so a rank is missing", error
        ) from error


class HorovodHandle(Handle):
    """Handle of a call of Horovod's.

    ``hvd``: the module ``horovod.torch``. ``handle``: Horovod's number for the call. ``place``: puts Horovod's
    result where it belongs; called once, when the call is waited for.
    """

    def __init__(self, hvd: Any, handle: int, name: str, ranks: Sequence[int], place: Callable[[Any], object]) -> None:
        super().__init__(name, ranks)
        self._hvd, self._handle, self._place = hvd, handle, place
        self._waited = False  # the result is in place: Horovod forgets its handle then
        self._views = _views(hvd, handle)

    def done(self) -> bool:
        return self._waited or bool(self._hvd.poll(self._handle))

    def _wait(self, timeout: float) -> None:
        deadline, pause = time.monotonic() + timeout, SHORTEST
        while not self.done():
            if time.monotonic() > deadline:
                raise CollectiveTimeout(f"AGM201: {self._name}: no answer from all ranks within {timeout:g} s")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST)
        if self._waited:
            return
        self._waited = True
        with _translated(self._name):
            self._place(self._hvd.synchronize(self._handle))
        self._views = []


class HorovodBackend(Backend):
    """Backend over the ranks of one process set; its calls have one prefix.

    ``hvd``: the module ``horovod.torch``. ``process_set``: Horovod's object; None: all ranks. ``prefix``: of the names
    of all calls. ``owned``: Horovod was initialised here, so it is shut down here.
    """

    name = "horovod"

    def __init__(self, hvd: Any, process_set: Any, prefix: str, *, owned: bool = False) -> None:
        self._hvd, self._set, self._prefix, self._owned = hvd, process_set, prefix, owned
        self._ranks = list(process_set.ranks) if process_set is not None else list(range(hvd.size()))
        self.rank, self.size = self._ranks.index(hvd.rank()), len(self._ranks)
        self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()
        self._children = 0  # communicators made of this one, for their prefixes
        self._of_sets: dict[int, int] = {}  # by the number of a process set: communicators made over it

    @property
    def stale(self) -> bool:
        hvd = self._hvd
        return bool(hvd.is_initialized() and self._set is None and (hvd.rank(), hvd.size()) != (self.rank, self.size))

    def renewed(self) -> HorovodBackend:
        return HorovodBackend(self._hvd, None, "agmerge", owned=self._owned)

    def over(self, process_set: Any) -> HorovodBackend | None:
        """Return a communicator over a process set that Horovod knows; None on ranks outside. Not collective.

        Raises ``ValueError`` for a set that Horovod does not know.
        """
        if process_set.process_set_id is None:
            raise ValueError(f"process_set={process_set} is unknown to Horovod. Call hvd.add_process_set() first.")
        if not process_set.included():
            return None
        # Counted by set: ranks outside may never make this call, and all ranks must go on agreeing on names.
        number = self._of_sets[process_set.process_set_id] = self._of_sets.get(process_set.process_set_id, 0) + 1
        return HorovodBackend(self._hvd, process_set, f"{self._prefix}.set{process_set.process_set_id}.{number}")

    @property
    def through_host(self) -> bool:
        return not self._hvd.nccl_built()

    def _options(self, name: str) -> dict[str, Any]:
        """Return the arguments that every call of Horovod's gets from us: its name and its process set."""
        options: dict[str, Any] = {"name": f"{self._prefix}/{matched(name)}"}
        return options if self._set is None else {**options, "process_set": self._set}

    def _start(
        self, name: str, place: Callable[[Any], object], call: Callable[..., int], *given: Any, **how: Any
    ) -> Handle:
        """Start ``call``, a function of Horovod's, with ``given`` and ``how``. ``place``: see the handle."""
        try:
            with _translated(name):
                handle = call(*given, **how, **self._options(name))
        except NoAnswer as error:  # it cannot even start: an earlier one has failed
            status.annotate(error, name, self._ranks)
            raise
        return HorovodHandle(self._hvd, handle, name, self._ranks, place)

    def summed_bytes(self, tensor: torch.Tensor) -> int:
        return (2 if tensor.dtype == torch.bfloat16 else 1) * tensor.nbytes  # as float32, see below

    def all_reduce(self, tensor: torch.Tensor, name: str, op: str = "sum") -> Handle:
        sent = tensor.float() if tensor.dtype == torch.bfloat16 else tensor  # Horovod does not know bfloat16
        sent = (torch.view_as_real(sent) if sent.is_complex() else sent).detach()

        def place(result: torch.Tensor) -> None:
            if sent.data_ptr() != tensor.data_ptr():
                tensor.copy_(result)

        return self._start(name, place, self._hvd.allreduce_async_, sent, op=getattr(self._hvd, op.capitalize()))

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor, name: str) -> Handle:
        if tensor.device.type == "cpu":
            return self._start(name, _bytes(out).copy_, self._hvd.allgather_async, _bytes(tensor))
        return self.gather_into(_bytes(out), _bytes(tensor), name)

    def gather_into(self, out: torch.Tensor, tensor: torch.Tensor, name: str) -> Handle:
        """Collective. Gather bytes of all ranks in ``out``, without an output of Horovod's own.

        Its thread would allocate that in another stream, and have NCCL wait for all that stands there.
        """
        members = {} if self._set is not None else {"process_set": self._hvd.global_process_set}
        return self._start(name, lambda result: None, self._hvd.mpi_ops._allgather_async, tensor, out, **members)

    def all_to_all(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        out_splits: Sequence[int],
        splits: Sequence[int],
        name: str,
    ) -> Handle:
        lengths = torch.tensor([tensor.element_size() * n for n in splits], dtype=torch.int32)

        def place(result: Any) -> None:
            _bytes(out).copy_(_first(result))

        return self._start(name, place, self._hvd.alltoall_async, _bytes(tensor), splits=lengths)

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, name: str) -> Handle:
        sent = tensor.float() if tensor.dtype == torch.bfloat16 else tensor.detach()
        return self._start(name, out.copy_, self._hvd.reducescatter_async, sent, op=self._hvd.Sum)

    def broadcast(self, tensor: torch.Tensor, root: int, name: str) -> Handle:
        return self._start(name, lambda result: None, self._hvd.broadcast_async_, _bytes(tensor), self._ranks[root])

    def barrier(self, name: str) -> Handle:
        return self.all_reduce(torch.zeros(1), name)

    def duplicate(self, label: str, timeout: float) -> HorovodBackend:
        return HorovodBackend(self._hvd, self._set, self._child())

    def subgroup(self, ranks: Sequence[int], label: str, timeout: float) -> HorovodBackend | None:
        prefix, members = self._child(), [self._ranks[rank] for rank in ranks]
        process_set = timeouts.bounded(lambda: self._process_set(members), timeout, label)
        return HorovodBackend(self._hvd, process_set, prefix) if self.rank in ranks else None

    def _process_set(self, members: list[int]) -> Any:
        """Collective. Return the process set of these ranks of the world, which Horovod refuses to make twice."""
        from horovod.common import process_sets

        for number, ranks in process_sets._basics._get_process_set_ids_and_ranks().items():
            if ranks == members:
                process_set = process_sets.ProcessSet(members)
                process_set.process_set_id = number
                return process_set
        return self._hvd.add_process_set(members)

    def close(self) -> None:
        if self._owned and self._hvd.is_initialized():
            self._hvd.shutdown()

    def _child(self) -> str:
        # Stable and short: the cache of responses goes by name.
        """Return a prefix for a new communicator: stable and short, since Horovod caches responses by name."""
        self._children += 1
        return f"{self._prefix}.{self._children}"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, 1-D: any dtype travels, also those that Horovod does not know."""
    return tensor.view(-1).view(torch.uint8).detach()


def _views(hvd: Any, handle: int) -> list[torch.Tensor]:
    """Return views of the tensors of a call, so that no thread of Horovod's lets go of the last reference in C++.

    Else it would need Python's lock for that. When Horovod shuts down because another rank has left, it lets go of all
    tensors under a lock that the start of a call waits for, with Python's in its hands: both then wait for ever. (A
    view refers to its base; what is handed to Horovod is therefore no view itself. These views are of nothing: the
    call has begun, and a thread of Horovod's may be setting the shape of its output at this very moment.)
    """
    handed = getattr(hvd.mpi_ops, "_handle_map", {}).get(handle, ())
    tensors = [tensor for item in handed for tensor in (item if isinstance(item, tuple) else (item,))]
    return [tensor.as_strided((0,), (1,), 0) for tensor in tensors if isinstance(tensor, torch.Tensor)]


def _first(result: Any) -> Any:
    """Return the result of an all-to-all without the lengths that newer versions of Horovod give with it."""
    return result[0] if isinstance(result, tuple) else result
