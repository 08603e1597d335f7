# SPDX-License-Identifier: Apache-2.0
"""torch.distributed as a backend: Gloo for tensors on the CPU, NCCL for tensors on a GPU."""

from __future__ import annotations

import os
import socket
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from agmerge.backends import mpi, slurm, status, streams, timeouts, torch_groups, torch_store
from agmerge.backends.base import Backend, Handle, Listen
from agmerge.backends.status import ProbeResult, Row, built_in
from agmerge.backends.torch_groups import translated
from agmerge.errors import AGMergeError, NoAnswer

# Warm-up: ranks are connected before the first message, where a library would do so during that.
#
# NCCL makes a communicator at the first call on a device, and connections at the first call of a kind. For that it
# allocates memory, which may wait until all kernels of the device have ended. In a hook some of these wait for other
# ranks, which may wait for this one to be connected: ranks would wait in a circle.
#
# Source: NCCL's manual, "Using multiple NCCL communicators concurrently"; its variable ``NCCL_RUNTIME_CONNECT``.

NAME = "warm-up"


def warm_up(comm: Backend, devices: Iterable[torch.device], timeout: float) -> None:
    """Collective. Make one small call of each kind over ``comm`` on each of ``devices``, and wait for it.

    ``devices``: outside the host's memory, as many on each rank, in the same order. To be called where nothing is under
    way on them, for all communicators in the same order on all ranks. ``timeout``: seconds, for each call.
    """
    if comm.size == 1:
        return
    for device in devices:
        for handle in _calls(comm, device):
            handle.wait(timeout)


def _calls(comm: Backend, device: torch.device) -> Iterator[Handle]:
    """Collective. Start the calls that exchanges make, each when the next one is asked for."""
    row, rows, each = torch.zeros(1, device=device), torch.zeros(comm.size, device=device), [1] * comm.size
    yield comm.all_reduce(row, f"{NAME}/sum")
    yield comm.reduce_scatter(row, rows, f"{NAME}/scatter")
    yield comm.all_gather(rows, row, f"{NAME}/gather")
    yield comm.all_to_all(torch.zeros_like(rows), rows, each, each, f"{NAME}/all to all")


# The backend.

OF_THE_WORLD = (
    "AGM305: {}: torch.distributed creates groups with all of its workers only, so exchange='two-level' with "
    "process_set= requires horovodrun or mpirun. Use another exchange."
)
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR")  # what torch.distributed reads, set by torchrun or by hand
SIZES: tuple[str, ...] = ("WORLD_SIZE",)
NODES = "PET_NNODES"  # torchrun's --nnodes as a variable, as a TrainJob of Kubernetes sets it
READS_SLURM = True
# Gloo's own gather hands messages on from neighbour to neighbour: ranks - 1 hops, each of which waits for a thread of
# another process. By an all-to-all each rank sends its message to all others at once: one hop, as many bytes on the
# network, and a copy here for each. Four ranks, two cores that compute, 64 KB at 200 Mbit/s, which take 31 ms: 60 to
# 75 ms by neighbours, 33 to 43 ms at once. Where messages are large, hops do not matter. Whole steps, see
# benchmarks/notebook/measurements.md: 7 % shorter on a shared link, up to 5 % longer with a port of 200 Mbit/s for each
# rank.
AT_ONCE = 8  # ranks, at most: with more of them, as many messages arrive at a rank at the same moment
LEAST_BY_NEIGHBOURS = 1 << 20  # bytes of a message
_inherited: Any = None  # process group of the process that has forked this one; written by _after_fork_in_child alone
PROBE = """
import json, torch, torch.distributed as dist
here = dist.is_available()
print(json.dumps({"version": torch.__version__, "distributed": here, "gloo": here and dist.is_gloo_available(),
                  "nccl": here and dist.is_nccl_available(), "gpus": torch.cuda.device_count()}))
"""


def initialised() -> bool:
    """Return whether the script has already called ``torch.distributed.init_process_group``."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def built() -> set[str]:
    """Return which of ``"gloo"`` and ``"nccl"`` torch has, to move tensors of the CPU and of GPUs."""
    import torch.distributed as dist

    if not dist.is_available():
        return set()
    return {name for name, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if there}


def inherits() -> bool:
    """Return whether the process group is of the process that has forked this one."""
    import torch.distributed as dist

    return _inherited is not None and initialised() and dist.group.WORLD is _inherited


def _after_fork_in_child() -> None:
    global _inherited
    _inherited = None
    if "torch.distributed" in sys.modules and initialised():
        _inherited = sys.modules["torch.distributed"].group.WORLD


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def workers() -> int:
    """Return how many workers the process group has that the script has initialised."""
    import torch.distributed as dist

    return dist.get_world_size()


def launched(env: Mapping[str, str]) -> bool:
    """Return whether the variables that torch.distributed needs are set, by torchrun or by hand.

    Raises :class:`agmerge.AGMergeError` if ``WORLD_SIZE``, or what Kubernetes has set for a torchrun that did not come,
    says that there are several workers and other variables are missing.
    """
    missing = [key for key in NEEDED if key not in env]
    if missing and int(env.get("WORLD_SIZE") or 1) > 1:
        raise AGMergeError(
            f"AGM006: WORLD_SIZE={env['WORLD_SIZE']}, but {' and '.join(missing)} not set. Set them too, or launch "
            "with torchrun."
        )
    if missing and env.get(NODES, "1") != "1":
        raise AGMergeError(
            f"AGM007: {NODES}={env[NODES]} is set for torchrun, but torchrun did not start this process. Change the "
            "command from `python train.py` to `torchrun train.py`."
        )
    return not missing


def can_join(env: Mapping[str, str]) -> bool:
    """Return whether srun has started this process as one of several tasks, and MPI is not what shall connect them.

    Under srun Slurm's PMI may be there without any MPI; mpi4py is meant only where it is installed.
    """
    return slurm.launched(env) and not (mpi.started_by_mpi(env) and mpi.installed())


def open(env: Mapping[str, str], timeout: float, listen: Listen) -> TorchBackend:
    """Collective. Join the process group of the launcher, or take the one that the script has made.

    ``env``: the launcher's variables. ``timeout``: seconds, for all of it. Ranks learn each other's addresses by
    ``listen`` before they connect, so that the network is one that they share. Raises :class:`agmerge.AGMergeError` if
    variables are missing and :class:`agmerge.NoAnswer` if ranks are.
    """
    import torch.distributed as dist

    if not dist.is_available():
        raise AGMergeError(
            "AGM011: This build of torch has no torch.distributed. Install another build, or launch one worker."
        )
    if dist.is_initialized():
        return _beside(dist, env, timeout)
    env = {**slurm.variables(env), **env} if slurm.launched(env) else env
    missing = [key for key in NEEDED if key not in env]
    if missing:
        raise AGMergeError(
            f"AGM006: backend='torch' requires the environment variables {', '.join(missing)}. Launch the script with "
            "torchrun, or set them."
        )
    meeting = torch_store.Meeting(dist, env, timeout)
    advice = ""
    if meeting.size > 1:
        address = listen(meeting.rank, meeting.gather, env)
        torch_store.check_interface()
        if address is not None:
            torch_store.choose_interface(address)
            advice = torch_store.advice(address)

    streams.settle_shared_gpus(meeting.rank, meeting.gather)

    def connect() -> Any:
        with translated("init()"):
            dist.init_process_group(
                torch_groups.kinds(dist),
                store=meeting.store,
                rank=meeting.rank,
                world_size=meeting.size,
                timeout=timedelta(seconds=timeout),
            )
        return torch_groups.new_group(dist, timeout)

    group = timeouts.bounded(connect, meeting.left, "init()", advice)
    return TorchBackend(dist, group, *_place(env, meeting.rank, meeting.gather), owns_world=True)


def diagnose(probe: ProbeResult, python: str, mpirun: str) -> Row:
    """Return the doctor's row of this backend, see :class:`agmerge.backends.registry.BackendModule`."""
    facts, fix = probe.facts, f"{python} -m pip install --force-reinstall torch"
    if probe.error:
        return Row("backend", "torch", False, probe.error, fix)
    if not facts["gloo"] and not facts["nccl"]:
        return Row("backend", "torch", False, f"torch {facts['version']} is built without torch.distributed", fix)
    return Row("backend", "torch", True, f"torch {facts['version']}: {built_in(facts)}; {facts['gpus']} GPUs")


def _beside(dist: Any, env: Mapping[str, str], timeout: float) -> TorchBackend:
    """Collective. Return a group of our own beside the script's.

    Calls of the one cannot meet those of the other, and ours moves tensors of the CPU too where the script's is NCCL
    alone.
    """
    advice = torch_store.advice("")
    seconds, is_chosen = torch_groups.timeout_of_script(dist)
    timeouts.take_over(seconds, is_chosen=is_chosen)
    timeout = max(timeout, timeouts.default())
    group = timeouts.bounded(lambda: torch_groups.new_group(dist, timeout), timeout, "init()", advice)

    def gather(text: bytes, name: str) -> list[bytes]:
        def call() -> list[bytes]:
            texts = [b""] * dist.get_world_size()
            with translated("init()"):
                # Our own group, which has Gloo: the script's may be NCCL alone, and would use GPU 0 on every rank.
                dist.all_gather_object(texts, text, group=group)
            return texts

        return timeouts.bounded(call, timeout, "init()", advice)

    streams.settle_shared_gpus(dist.get_rank(), gather)
    return TorchBackend(dist, group, *_place(env, dist.get_rank(), gather))


def _place(env: Mapping[str, str], rank: int, gather: Callable[[bytes, str], list[bytes]]) -> tuple[int, int]:
    """Return (local rank, local size): the launcher's, else counted by host name."""
    if "LOCAL_RANK" in env and "LOCAL_WORLD_SIZE" in env:
        return int(env["LOCAL_RANK"]), int(env["LOCAL_WORLD_SIZE"])
    hosts = gather(socket.gethostname().encode(), "place")
    same = [r for r, host in enumerate(hosts) if host == hosts[rank]]
    return same.index(rank), len(same)


class TorchHandle(Handle):
    """Handle of a ``torch.distributed.Work``, with our errors. Keeps its tensors alive until it has been waited for.

    ``finished`` gets the work then. Gloo's threads let go of theirs a little after it is done; were theirs the last
    reference, they would need Python's lock to free its tensors, and a process aborts while its interpreter is
    ending.
    """

    def __init__(self, work: Any, name: str, ranks: Sequence[int], finished: list[Any], *tensors: torch.Tensor) -> None:
        super().__init__(name, ranks)
        self._work, self._finished, self._tensors = work, finished, tensors

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def _wait(self, timeout: float) -> None:
        with translated(self._name, f" within {timeout:g} s"):
            self._work.wait(timedelta(seconds=timeout))
        self._forget()

    def wait_on_stream(self, timeout: float) -> None:
        if self._tensors and self._tensors[0].device.type == "cpu":
            self.wait(timeout)
            return
        with translated(self._name):
            self._work.wait()  # with a time-out, the host would look every millisecond until it has ended
        self._forget()

    def _forget(self) -> None:
        """Release the tensors, and keep the work until its backend's threads have let go of it."""
        self._tensors = ()
        self._finished.append(self._work)


class TorchBackend(Backend):
    """Backend over one process group of torch's.

    ``dist``: the module ``torch.distributed``. ``owns_world``: the world was made here, so it is destroyed here.
    """

    name = "torch"

    def __init__(self, dist: Any, group: Any, local_rank: int, local_size: int, *, owns_world: bool = False) -> None:
        self._dist, self._group, self._owns_world = dist, group, owns_world
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.local_rank, self.local_size = local_rank, local_size
        # torch 2.13 has new names for the two collectives on one tensor and warns at the old ones.
        self._ranks = [self._world_rank(rank) for rank in range(self.size)]
        self._gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        self._finished: list[Any] = []  # works, up to the next start: see TorchHandle
        self._children: weakref.WeakSet[TorchBackend] = weakref.WeakSet()  # made of this one, closed with it
        # When nobody refers to this backend any more; not once NCCL has moved something, see `torch_groups`.
        self._dropping = weakref.finalize(self, torch_groups.dropped.append, group)
        self._dropping.atexit = False

    @property
    def through_host(self) -> bool:
        # Gloo gathers no tensors of a GPU.
        return not torch_groups.has_nccl(self._dist)

    def scatters_by_all_reduce(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"  # Gloo sums all of it on every rank: measured by bytes, with 2, 3 and 4

    def _start(
        self, name: str, call: Callable[..., Any], *given: Any, tensors: Sequence[torch.Tensor], **how: Any
    ) -> Handle:
        """Start ``call``, a function of torch's, with ``given`` and ``how``. ``tensors``: to be kept alive."""
        self._finished.clear()
        if torch_groups.dropped:
            torch_groups.give_back(self._dist)
        if tensors[0].device.type != "cpu":
            self._dropping.detach()
        try:
            with translated(name):
                work = call(*given, **how, group=self._group, async_op=True)
        except NoAnswer as error:  # it cannot even start: an earlier one has failed
            status.annotate(error, name, self._ranks)
            raise
        return TorchHandle(work, name, self._ranks, self._finished, *tensors)

    def all_reduce(self, tensor: torch.Tensor, name: str, op: str = "sum") -> Handle:
        kind = getattr(self._dist.ReduceOp, op.upper())
        return self._start(name, self._dist.all_reduce, tensor, tensors=[tensor], op=kind)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor, name: str) -> Handle:
        if self._gathers_at_once(tensor):
            copies = tensor.repeat(self.size)
            return self._start(name, self._dist.all_to_all_single, out, copies, tensors=[out, copies])
        return self._start(name, self._gather, out, tensor, tensors=[out, tensor])

    def _gathers_at_once(self, tensor: torch.Tensor) -> bool:
        """Return whether a message, as long on every rank, goes to all others at once rather than by neighbours."""
        small = 0 < tensor.nbytes < LEAST_BY_NEIGHBOURS
        return small and 2 < self.size <= AT_ONCE and tensor.device.type == "cpu"

    def all_to_all(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        out_splits: Sequence[int],
        splits: Sequence[int],
        name: str,
    ) -> Handle:
        call, lengths = self._dist.all_to_all_single, [list(out_splits), list(splits)]
        return self._start(name, call, out, tensor, *lengths, tensors=[out, tensor])

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, name: str) -> Handle:
        return self._start(name, self._scatter, out, tensor, tensors=[out, tensor])

    def broadcast(self, tensor: torch.Tensor, root: int, name: str) -> Handle:
        return self._start(name, self._dist.broadcast, tensor, self._ranks[root], tensors=[tensor])

    def barrier(self, name: str) -> Handle:
        # NCCL's barrier would pick a device by itself; a sum of one element on the CPU cannot go wrong.
        return self.all_reduce(torch.zeros(1), name)

    def duplicate(self, label: str, timeout: float) -> TorchBackend:
        copy = self.subgroup(range(self.size), label, timeout)
        assert copy is not None
        return copy

    def subgroup(self, ranks: Sequence[int], label: str, timeout: float) -> TorchBackend | None:
        if self.size < self._dist.get_world_size():  # it counts groups, and names them by their number
            raise AGMergeError(OF_THE_WORLD.format(label))
        torch_groups.give_back(self._dist)
        of_world = [self._world_rank(rank) for rank in ranks]
        group = timeouts.bounded(lambda: torch_groups.new_group(self._dist, timeout, of_world, label), timeout, label)
        if self.rank not in ranks:
            return None
        child = TorchBackend(self._dist, group, self.local_rank, self.local_size)
        self._children.add(child)
        return child

    def drop(self) -> None:
        self._finished.clear()  # a work holds its group's connections
        self._dropping()
        self._group = None

    def abort(self) -> None:
        if self._group is not None and torch_groups.has_nccl(self._dist) and self._dist.is_initialized():
            torch_groups.abort(self._group)

    def close(self) -> None:
        """Release the group as far as it takes no other rank; the one with NCCL only if it is the world's own.

        Raises :class:`agmerge.CollectiveTimeout` if the others do not leave the world as well, where it has NCCL.
        """
        lost, has_nccl = status.any_wait_failed(), torch_groups.has_nccl(self._dist)
        for child in () if lost and not has_nccl else self._children:  # to close what a rank is missing from is to wait
            child.close()
        self._finished.clear()
        is_gloo = self._dropping.detach() is not None
        torch_groups.give_back(self._dist)
        if lost:
            self.abort()
        if self._dist.is_initialized() and self._group is not None and not (lost and has_nccl):
            if self._owns_world and has_nccl:
                timeouts.bounded(self._dist.destroy_process_group, timeouts.default(), "shutdown()")
            elif self._owns_world or is_gloo:
                self._dist.destroy_process_group(None if self._owns_world else self._group)
        self._group = None

    def _world_rank(self, rank: int) -> int:
        """Return the rank of the world that has number ``rank`` in this group."""
        return int(self._dist.get_global_rank(self._group, rank))
