# SPDX-License-Identifier: Apache-2.0
"""Train on pretended devices: ranks are threads, each with a device of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Any, TypeVar
from unittest.mock import patch

import torch

import sparsifiers
from agmerge import testing
from agmerge.backends import torch_groups
from agmerge.backends.local import LocalBackend
from agmerge.backends.torch import TorchBackend
from agmerge.runtime import workers
from pretend import hook_errors, streams
from pretend.device import Device
from pretend.hosts import Hosts
from pretend.nccl import DeviceBackend, Turn
from pretend.process_groups import Dist, Group, Machine
from pretend.registration import NAME

T = TypeVar("T")
NEEDS_RANKS = ("oktopk", "masked", "two-level")  # exchanges of which a hook needs what other ranks have sent


def needs_own_thread(exchange: str, compression: str) -> bool:
    """Whether hooks need other ranks, see :func:`on_devices`: by these names of an exchange and a compressor."""
    return exchange in NEEDS_RANKS or sparsifiers.is_quantiser(compression)


def on_devices(
    size: int,
    body: Callable[[int, Device], T],
    *,
    own_thread: bool = False,
    watched: Collection[int] | None = None,
    **options: Any,
) -> list[T]:
    """``body(rank, device)`` on every rank of an in-memory group; ``watched``: these ranks' devices; None: all.

    Hooks come on autograd's device thread, which all ranks share: what waits for another rank in a hook needs
    ``own_thread``, by which hooks come on the rank's. ``options``: of :func:`agmerge.testing.run`.
    """

    turn = Turn()

    def rank_body(rank: int) -> T:
        device = Device(is_watched=watched is None or rank in watched)
        device.use()
        workers.bind(DeviceBackend(workers.world(), device, turn))
        with turn.taken(), torch.autograd.set_multithreading_enabled(not own_thread):
            return body(rank, device)

    with streams.installed():
        return testing.run(size, rank_body, **options)


class Dropped:
    """Groups that nobody refers to any more, of each rank: the library has one such queue in a process."""

    def __init__(self, size: int) -> None:
        self._of = [deque[Group]() for _ in range(size)]

    def append(self, group: Group) -> None:
        self._of[group.dist.rank].append(group)

    def popleft(self) -> Group:
        return self._of[workers.rank()].popleft()

    def __bool__(self) -> bool:
        return bool(self._of[workers.rank()])


def on_process_groups(
    size: int, body: Callable[[Dist], T], *, local_size: int, seed: int = 0, **options: Any
) -> list[T]:
    """``body(dist)`` on every rank, with the library's backend for torch: :mod:`pretend.process_groups`.

    ``local_size``: ranks of a node. ``seed``: of the order in which hosts go on. Hooks come on the rank's own thread.
    ``options``: of :func:`agmerge.testing.run`.
    """
    hosts = Hosts(size, seed)
    machine = Machine(hosts, size)

    def rank_body(rank: int) -> T:
        world = workers.world()
        assert isinstance(world, LocalBackend)
        dist = Dist(machine, world)
        dist.device.use()
        workers.bind(TorchBackend(dist, dist.world, rank % local_size, local_size, owns_world=True))
        with hosts.run(rank), torch.autograd.set_multithreading_enabled(False):
            return body(dist)

    with (
        streams.installed(),
        hook_errors.held(),
        patch.object(torch_groups, "kinds", lambda dist: f"cpu:gloo,{NAME}:nccl"),
        patch.object(torch_groups, "dropped", Dropped(size)),
    ):
        return testing.run(size, rank_body, **options)
