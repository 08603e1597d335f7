# SPDX-License-Identifier: Apache-2.0
"""Process groups that behave as torch's with NCCL and Gloo do, for ranks that are threads with pretended devices.

A :class:`Dist` stands for ``torch.distributed`` on one rank, so that the library's own backend for torch runs on it.
A communicator of NCCL's is made at a group's first collective on a device. To make one, and to destroy it, takes all
of its ranks, each of which waits for its device first (:mod:`pretend.machine`). Who waits for ever is ended by the
watchdog: see :class:`pretend.hosts.Stuck`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agmerge.backends import Handle
from agmerge.backends.local import LocalBackend
from pretend.device import Device
from pretend.machine import Collective, Launched, Machine
from pretend.tensors import DeviceTensor

NEW, MADE, DESTROYED = "new group", "is made", "is destroyed"  # the first is torch's, the others NCCL's


class Call(NamedTuple):
    """What one rank asks of a communicator, in the order in which it does."""

    communicator: str  # its label, and which of those with this label on this rank
    what: str  # a collective, or NEW, MADE or DESTROYED
    elements: int = 0  # that must be as many on all ranks


class Group:
    """A process group as one rank sees it.

    ``number``: the same on all ranks. ``label``: the name of its communicator in :class:`Call`.
    """

    def __init__(self, dist: Dist, number: int, label: str, host: LocalBackend, device: LocalBackend) -> None:
        self.dist, self.number, self.label, self.host, self.device = dist, number, label, host, device
        self.stream = dist.device.new_stream(label)
        self.collectives: list[Collective] = []
        self.is_made = False  # has a communicator of NCCL's

    def _get_backend(self, device: torch.device) -> Group:
        return self

    def abort(self) -> None:
        """End this rank's kernels, without the others."""
        self.dist.machine.abort(self.dist.rank, self.collectives)

    def change(self, what: str) -> None:
        """Make the communicator, or destroy it, together with its other ranks."""
        self.dist.calls.append(Call(self.label, what))
        meeting = f"group {self.number}, {self.label}, which {what}"
        self.dist.machine.meet(self.dist.rank, self.device.ranks, meeting, idle=True)
        self.is_made = what == MADE


class Work:
    """A collective under way. ``collective``: on the device, ended at ``clock``; None: it is Gloo's."""

    def __init__(self, group: Group, inner: Handle, collective: Collective | None, what: str) -> None:
        self._dist, self._inner, self._collective, self._what = group.dist, inner, collective, f"{group.label}: {what}"
        self._clock = dict(group.stream.clock)

    def is_completed(self) -> bool:
        """Whether it has ended, which each rank sees at another moment."""
        self._dist.machine.hosts.pause(self._dist.rank)
        return self._has_ended()

    def _has_ended(self) -> bool:
        return self._inner.done() if self._collective is None else self._collective.has_ended

    def wait(self, timeout: timedelta | None = None) -> None:
        """Let the host wait; without a time-out, the current stream of a device.

        The host computes what devices would: so it waits there, too, as long as other hosts can go on.
        """
        queues = self._collective is not None and timeout is None
        seconds = 0.0 if queues else timeout.total_seconds() if timeout is not None else math.inf
        if self._dist.machine.hosts.wait(self._dist.rank, self._has_ended, self._what, seconds):
            self._inner._wait(0.0)  # puts the result in place
        elif not queues:
            raise RuntimeError(f"Timed out: {self._what}")
        if queues:
            self._dist.device.wait(self._dist.device.stream, self._clock)
        elif self._collective is not None:
            self._dist.device.know(self._clock)


class Dist:
    """``torch.distributed`` on one rank of ``world``, an in-memory group of which ``machine`` has the devices.

    ``calls``: what this rank has asked for, in order.
    """

    ReduceOp = SimpleNamespace(SUM="sum", MIN="min", MAX="max", PRODUCT="product")

    def __init__(self, machine: Machine, world: LocalBackend) -> None:
        self.machine, self.rank, self._inner = machine, world.rank, world
        self._kernels = Launched(machine, world.rank)
        self.device = Device(is_watched=False, kernels=self._kernels)
        self.calls: list[Call] = []
        self._made = -1  # groups of all ranks, without the world
        self._labels: Counter[str] = Counter()  # groups of this rank, by label
        self._groups: list[Group] = []  # of this rank
        self._is_initialized = True
        self.world = self._new_group(range(world.size), "world")

    def is_initialized(self) -> bool:
        return self._is_initialized

    def get_rank(self, group: Group) -> int:
        return group.device.rank

    def get_world_size(self, group: Group | None = None) -> int:
        return (group or self.world).device.size

    def get_global_rank(self, group: Group, rank: int) -> int:
        return group.device.ranks[rank]

    def new_group(self, ranks: Sequence[int] | None, *, group_desc: str, **options: Any) -> Group | None:
        """Collective. Meet all ranks of the world, as torch does; nothing is made on devices."""
        everyone = range(self.world.device.size)
        self.calls.append(Call(group_desc, NEW))
        self.machine.meet(self.rank, everyone, f"new group {self._made + 1}", idle=False)
        return self._new_group(everyone if ranks is None else ranks, group_desc)

    def _new_group(self, ranks: Sequence[int], label: str) -> Group | None:
        self._made += 1
        host, device = (self._inner.subgroup(ranks, label, 0.0) for _ in range(2))
        if host is None or device is None:
            return None
        self._labels[label] += 1
        self._groups.append(Group(self, self._made, f"{label} {self._labels[label]}", host, device))
        return self._groups[-1]

    def destroy_process_group(self, group: Group | None = None) -> None:
        """Collective, if it has moved tensors of devices. Destroy a group; None: all of them."""
        for one in list(self._groups) if group is None else [group]:
            if one not in self._groups:
                raise ValueError("an unknown group")
            if one.is_made:
                one.change(DESTROYED)
            self._groups.remove(one)
        self._is_initialized = group is not None

    # -- collectives ----------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, *, op: str, group: Group, async_op: bool) -> Work:
        return self._start(group, "all_reduce", tensor.numel(), [tensor], op)

    def all_gather_into_tensor(self, out: Tensor, tensor: Tensor, *, group: Group, async_op: bool) -> Work:
        return self._start(group, "all_gather", tensor.numel(), [out, tensor])

    def reduce_scatter_tensor(self, out: Tensor, tensor: Tensor, *, group: Group, async_op: bool) -> Work:
        return self._start(group, "reduce_scatter", out.numel(), [out, tensor])

    def all_to_all_single(
        self, out: Tensor, tensor: Tensor, *splits: Sequence[int], group: Group, async_op: bool
    ) -> Work:
        even = [tensor.numel() // group.device.size] * group.device.size
        return self._start(group, "all_to_all", 0, [out, tensor], *(splits or (even, even)))

    def broadcast(self, tensor: Tensor, root: int, *, group: Group, async_op: bool) -> Work:
        return self._start(group, "broadcast", tensor.numel(), [tensor], group.device.ranks.index(root))

    def _start(self, group: Group, what: str, elements: int, tensors: Sequence[Tensor], *how: Any) -> Work:
        """Launch a collective of these tensors: on the device, or Gloo's on the host."""
        self.machine.hosts.pause(self.rank)
        on_device = isinstance(tensors[0], DeviceTensor)
        if on_device and not group.is_made:
            group.change(MADE)
        self.calls.append(Call(group.label, what if on_device else f"{what} on the host", elements))
        backend, given = (group.device if on_device else group.host), [_host(one) for one in tensors]
        call: Callable[..., Handle] = getattr(backend, what)
        inner = call(*given, what, *how) if what == "all_reduce" else call(*given, *how, what)
        if not on_device:
            return Work(group, inner, None, what)
        group.stream.wait(self.device.stream.clock)
        collective = self.machine.launch(self.rank, group.device.ranks, (group.number, len(group.collectives)))
        self._kernels.places[collective] = group.stream, group.stream.tick()
        group.collectives.append(collective)
        return Work(group, inner, collective, what)


def _host(tensor: Tensor) -> Tensor:
    return tensor.host if isinstance(tensor, DeviceTensor) else tensor
