# SPDX-License-Identifier: Apache-2.0
"""Group of ranks that exchange with each other: communicators, counted bytes, clocks and side streams."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from agmerge.backends import Backend, Handle, topology
from agmerge.backends.base import DelegatingBackend
from agmerge.backends.handshake import Fact, require_agreement
from agmerge.backends.streams import Streams, streams_of
from agmerge.backends.torch import warm_up
from agmerge.metrics import totals
from agmerge.metrics.step_times import Clock, Seconds
from agmerge.metrics.totals import Collective
from agmerge.step.config import TWO_LEVEL, Config
from agmerge.step.kept_results import KeptBackend, KeptResults

# Clocks: a device has its own, and all else goes by the host's.


class HostClock(Clock):
    """Clock of the host, for tensors on the host."""

    mark = staticmethod(time.perf_counter)

    def since(self, origin: float, marks: Sequence[float]) -> Seconds:
        return np.array(marks, dtype=np.float64) - origin


class DeviceClock(Clock):
    """Clock of one device, with events in its current stream: they tell when it gets there, not when the host asked.

    An event that tells time takes the host some microseconds to make, and there are two for each tensor. ``streams``:
    of the device's kind.
    """

    on_device = True

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self._device, self._streams = device, streams

    def mark(self) -> Any:
        return self._streams.record(self._streams.current(self._device), timed=True)

    def since(self, origin: Any, marks: Sequence[Any]) -> Seconds:
        return np.array([self._streams.seconds(origin, mark) for mark in marks], dtype=np.float64)


def clock_for(devices: Iterable[torch.device]) -> Clock:
    """Return the clock of the only device; with several, which have no time in common, the host's."""
    distinct = set(devices)
    if len(distinct) == 1 and (streams := streams_of(device := distinct.pop())) is not None:
        return DeviceClock(device, streams)
    return HostClock()


# Bytes that leave this rank: collectives are noted where they start, in one place for all exchanges.

Note = Callable[[Collective], object]  # is given each collective, see :class:`agmerge.metrics.totals.Totals`


def nobody_notes(collective: Collective) -> None:
    """Forget a collective."""


class CountedBackend(DelegatingBackend):
    """Communicator that tells ``note`` of its collectives. Barriers move nothing, and are not told.

    Communicators made from it are not counted; their users count for themselves.
    """

    def __init__(self, inner: Backend, note: Note) -> None:
        super().__init__(inner)
        self._note = note

    def all_reduce(self, tensor: torch.Tensor, name: str, op: str = "sum") -> Handle:
        """Collective. See :meth:`Backend.all_reduce`."""
        self._note((totals.all_reduce_bytes, (self._inner.summed_bytes(tensor), self.size)))
        return self._inner.all_reduce(tensor, name, op)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor, name: str) -> Handle:
        """Collective. See :meth:`Backend.all_gather`."""
        self._note((totals.all_gather_bytes, (tensor.nbytes, self.size)))
        return self._inner.all_gather(out, tensor, name)

    def all_to_all(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        out_splits: Sequence[int],
        splits: Sequence[int],
        name: str,
    ) -> Handle:
        """Collective. See :meth:`Backend.all_to_all`."""
        width = tensor.element_size()
        self._note((totals.all_to_all_bytes, ([width * length for length in splits], self.rank)))
        return self._inner.all_to_all(out, tensor, out_splits, splits, name)

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, name: str) -> Handle:
        """Collective. See :meth:`Backend.reduce_scatter`."""
        whole = self._inner.scatters_by_all_reduce(tensor)
        moved = totals.all_reduce_bytes if whole else totals.reduce_scatter_bytes
        self._note((moved, (self._inner.summed_bytes(tensor), self.size)))
        return self._inner.reduce_scatter(out, tensor, name)

    def broadcast(self, tensor: torch.Tensor, root: int, name: str) -> Handle:
        """Collective. See :meth:`Backend.broadcast`."""
        self._note((totals.broadcast_bytes, (tensor.nbytes, self.size, self.rank, root)))
        return self._inner.broadcast(tensor, root, name)


# Side streams.

ELSEWHERE = (
    "AGM703: Tensors are on {device}, which is not the current device of this process, so other libraries and pinned "
    "memory use {kind}:0 on every rank. Call torch.{kind}.set_device() first."
)


class SideStreams:
    """One stream for each device, in which all device work of an exchange is queued: backward goes on beside it.

    A gradient may be ready in any stream: :meth:`note` it there, then queue its readers :meth:`within`. Before results
    are read, or tensors freed that are read within, :meth:`join` is required. Without devices, or where their streams
    are not known, all methods do nothing.
    """

    def __init__(self) -> None:
        self._kinds: dict[torch.device, Streams] = {}  # of the devices that are served
        self._side: dict[torch.device, Any] = {}  # one of each device that ever was: allocators keep memory by stream
        self._noted: dict[torch.device, dict[int, Any]] = {}  # streams by their numbers, since `within`

    def serve(self, devices: Iterable[torch.device]) -> None:
        """Work on ``devices`` from now on, and on no others. Warns where this thread's own device is another one."""
        known = {device: streams_of(device) for device in devices}
        self._kinds = {device: kind for device, kind in known.items() if kind is not None}
        new = {device: kind for device, kind in self._kinds.items() if device not in self._side}
        if new and not any(kind.is_current(device) for device, kind in self._kinds.items()):
            device = next(iter(new))
            warnings.warn(ELSEWHERE.format(device=device, kind=device.type), stacklevel=2)
        for device, kind in new.items():
            self._side[device], self._noted[device] = kind.new(device), {}

    def note(self, device: torch.device) -> None:
        """Record the stream that this thread queues into now: tensors that are ready in it will be read."""
        kind = self._kinds.get(device)
        if kind is not None and (number := kind.number(device)) not in self._noted[device]:
            self._noted[device][number] = kind.current(device)

    def follow(self) -> None:
        """Make work queued within from now on wait for the noted streams, and for this thread's own.

        Also before memory that was allocated within is freed: other streams may have read it.
        """
        for device, kind in self._kinds.items():
            self.note(device)
            noted, self._noted[device] = self._noted[device], {}
            for stream in noted.values():
                kind.wait(self._side[device], kind.record(stream))

    def within(self) -> AbstractContextManager[None]:
        """Make this thread queue into the side streams inside the context, after :meth:`follow`."""
        return self._within() if self._kinds else nullcontext()

    @contextmanager
    def _within(self) -> Iterator[None]:
        self.follow()
        with ExitStack() as entered:
            for device, kind in self._kinds.items():
                entered.enter_context(kind.within(self._side[device]))
            yield

    def join(self) -> None:
        """Make work that this thread queues from now on wait for all that was queued within. The host does not wait."""
        for device, kind in self._kinds.items():
            kind.wait(kind.current(device), kind.record(self._side[device]))


# The group.


class Group:
    """Ranks of one exchange, from :meth:`connect` to :meth:`leave`; none before and after.

    ``kept``: keeps the results of collectives, for ranks that go on when one is lost; None: they do not.
    """

    def __init__(self, kept: KeptResults | None = None) -> None:
        self.kept = kept
        self.world: Backend | None = None  # from which it was connected
        self.comm: Backend | None = None  # of its own
        self.second: Backend | None = None  # another one of the same ranks, for second phases; None: not needed, so far
        self.outside = False  # of the process set: this rank exchanges nothing
        self.shard: tuple[int, int] | None = None  # of every tensor, this rank's: which of how many (two-level)
        self.nodes: topology.Nodes | None = None  # exchange="two-level"
        self._devices: Sequence[torch.device] = ()  # on which communicators are used
        self.side = SideStreams()  # kept: memory that was used in a stream is of use to that stream alone

    @property
    def settled(self) -> bool:
        """True if there is a group, or this rank is known to be outside of it."""
        return self.comm is not None or self.outside

    @property
    def alone(self) -> bool:
        """True if this rank has no other one to exchange with."""
        return self.comm is None or self.comm.size == 1

    def connect(
        self,
        world: Backend,
        comm: Backend | None,
        second: Backend | None,
        config: Config,
        facts: Sequence[Fact],
        devices: Sequence[torch.device] = (),
    ) -> None:
        """Collective. Exchange among the ranks of ``comm`` (None: not this one), and compare ``facts`` first (G1).

        ``comm`` is a communicator of this exchange's own among the workers of ``world``, and ``second`` another one of
        the same ranks, for the second phases of messages. ``devices``: those outside the host's memory with tensors
        that are exchanged. Raises :class:`agmerge.RankMismatchError` on every rank where facts differ.
        """
        self.world, self.comm, self.second, self.outside = world, comm, second, comm is None
        self._devices = devices
        if comm is None:
            return
        if self.kept is not None:
            self.comm = comm = KeptBackend(comm, self.kept)
            self.second = None if second is None else KeptBackend(second, self.kept)
        self.side.serve(devices)
        advice = "Use the same model and the same arguments on every rank."
        require_agreement(comm, facts, what="DistributedOptimizer", advice=advice, timeout=config.guards.timeout)
        if config.merging.exchange == TWO_LEVEL:
            self.nodes = topology.form(comm, config.guards.timeout, wants_second=config.quantises)
        self.shard = None if self.nodes is None else self.nodes.shard  # also where a checkpoint has assumed another one
        for made in self._communicators():
            warm_up(made, devices, config.guards.timeout)

    def connect_second(self, config: Config) -> None:
        """Collective. Make the communicator of second phases, where ``config`` needs one now and all ranks take part.

        Making it needs all ranks of ``world``: those outside the process set do not call this. There messages are
        gathered.
        """
        if self.comm is None or self.world is None or self.second is not None or not config.quantises:
            return
        if 2 < self.comm.size == self.world.size and self.nodes is None:
            self.second = self.comm.duplicate("agmerge optimizer, second phases", config.guards.timeout)
            warm_up(self.second, self._devices, config.guards.timeout)
            if self.kept is not None:
                self.second = KeptBackend(self.second, self.kept)

    def assume(self, shard: tuple[int, int] | None) -> None:
        """Use a checkpoint's ``shard`` until there is a group, which has its own."""
        self.shard = shard

    @property
    def second_across(self) -> Backend | None:
        """Communicator of second phases between the ranks that exchange messages; None: there is none."""
        return self.second if self.nodes is None else self.nodes.second

    def leave(self) -> None:
        """Forget the group."""
        self.comm = self.second = self.nodes = None
        self.outside = False

    def abort(self) -> None:
        """End what is under way, without the other ranks: one of them is lost."""
        for comm in self._communicators():
            comm.abort()

    def close(self) -> None:
        """Close the communicators."""
        for comm in self._communicators():
            comm.close()

    def _communicators(self) -> list[Backend]:
        """Return those that there are, in the same order on all ranks."""
        made = [] if self.nodes is None else self.nodes.communicators
        return [*made, *(comm for comm in (self.comm, self.second) if comm is not None)]
