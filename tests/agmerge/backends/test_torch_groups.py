# SPDX-License-Identifier: Apache-2.0
"""When torch's groups are destroyed, aborted and kept: NCCL's need the other ranks for the first."""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import agmerge
from agmerge.backends import status, timeouts, torch_groups
from agmerge.backends.torch import TorchBackend

GLOO, NCCL = "gloo", "cpu:gloo,cuda:nccl"


class Group:
    """A group of torch's. ``spins``: until when an abort lasts; None: it ends at once."""

    def __init__(self, dist: Dist, name: str, spins: threading.Event | None = None) -> None:
        self._dist, self.name, self._spins = dist, name, spins

    def _get_backend(self, device: torch.device) -> Group:
        return self

    def abort(self) -> None:
        self._dist.called.append(f"abort {self.name}")
        if self._spins is not None:
            self._spins.wait(60.0)


class Dist:
    """A double of ``torch.distributed`` on one of two ranks, with a log of which calls end which groups."""

    ReduceOp, ProcessGroup = SimpleNamespace(SUM="sum"), Group
    all_gather_into_tensor = reduce_scatter_tensor = None

    def __init__(self) -> None:
        self.called: list[str] = []
        self.others_come = threading.Event()  # to destroy a group, too
        self.others_come.set()

    def get_rank(self, group: object) -> int:
        return 0

    def get_world_size(self, group: object = None) -> int:
        return 2

    def get_global_rank(self, group: object, rank: int) -> int:
        return rank

    def is_initialized(self) -> bool:
        return True

    def new_group(self, ranks: list[int], *, group_desc: str, **how: Any) -> Group:
        return Group(self, group_desc)

    def destroy_process_group(self, group: Group | None = None) -> None:
        assert self.others_come.wait(60.0)
        self.called.append(f"destroy {'world' if group is None else group.name}")

    def all_reduce(self, tensor: torch.Tensor, **how: Any) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda *timeout: None, is_completed=lambda: True)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give each test a process of its own, as far as groups and failed waits go."""
    monkeypatch.setattr(torch_groups, "dropped", deque())
    yield
    status.reset()


def worlds(kinds: str, monkeypatch: pytest.MonkeyPatch, device: str) -> tuple[Dist, TorchBackend, TorchBackend]:
    """Return a world made here and an optimizer's communicator, which has moved a tensor of ``device``."""
    monkeypatch.setattr(torch_groups, "kinds", lambda dist: kinds)
    dist = Dist()
    world = TorchBackend(dist, Group(dist, "world"), 0, 1, owns_world=True)
    comm = world.duplicate("optimizer", 10.0)
    comm.all_reduce(torch.empty(1, device=device), "buffer 0").wait(1.0)
    return dist, world, comm


@pytest.mark.parametrize(
    "kinds, device, lost, called",
    [
        (GLOO, "cpu", False, ["destroy optimizer", "destroy world"]),
        (GLOO, "cpu", True, ["destroy world"]),
        (NCCL, "cpu", False, ["destroy optimizer", "destroy world"]),  # it has made no communicator of NCCL's
        (NCCL, "meta", False, ["destroy world"]),  # torch destroys all with it, in the same order on all ranks
        (NCCL, "meta", True, ["abort optimizer", "abort world"]),  # kernels that wait for the lost one would never end
    ],
)
def test_what_ends_with_the_world(
    kinds: str, device: str, lost: bool, called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dist, world, comm = worlds(kinds, monkeypatch, device)
    status._record_failed_wait(lost)
    world.close()
    assert comm is not None and dist.called == called


@pytest.mark.parametrize("device, lost, called", [("cpu", False, 1), ("meta", False, 0), ("meta", True, 1)])
def test_an_optimizer_that_closes_does_not_wait_for_others(
    device: str, lost: bool, called: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dist, _, comm = worlds(NCCL, monkeypatch, device)
    status._record_failed_wait(lost)
    comm.close()
    comm.close()
    assert dist.called == [f"{'abort' if lost else 'destroy'} optimizer"][:called]


@pytest.mark.parametrize("drops", [True, False], ids=["dropped", "collected"])
@pytest.mark.parametrize("device, called", [("cpu", ["destroy optimizer"]), ("meta", [])])
def test_no_finalizer_destroys_a_communicator_of_nccl(
    drops: bool, device: str, called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dist, world, comm = worlds(NCCL, monkeypatch, device)
    if drops:
        comm.drop()
    del comm
    gc.collect()
    world.all_reduce(torch.empty(1), "next")
    assert dist.called == called


def test_an_abort_that_lasts_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_groups, "ABORTED_WITHIN", 0.01)
    dist, ends = Dist(), threading.Event()
    torch_groups.abort(Group(dist, "stuck", ends))
    assert dist.called == ["abort stuck"]
    ends.set()


@pytest.mark.parametrize("kinds, called", [(GLOO, []), (NCCL, ["abort optimizer"])])
def test_only_nccl_has_something_to_abort(kinds: str, called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    dist, _, comm = worlds(kinds, monkeypatch, "cpu")
    comm.abort()
    assert dist.called == called


def test_a_world_that_others_do_not_leave_is_left_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(timeouts.VARIABLE, "0.05")
    dist, world, _ = worlds(NCCL, monkeypatch, "meta")
    dist.others_come.clear()
    with pytest.raises(agmerge.CollectiveTimeout, match="shutdown"):
        world.close()
    dist.others_come.set()
