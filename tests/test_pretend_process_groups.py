# SPDX-License-Identifier: Apache-2.0
"""The process groups that stand for NCCL's, by themselves: what waits for what, and that a deadlock is seen."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from pretend.hosts import Stuck
from pretend.process_groups import Dist, Group, Work
from pretend.tensors import PLACE, put
from pretend.training import on_process_groups

SOON = timedelta(seconds=1)


def start(dist: Dist, group: Group, elements: int = 1) -> Work:
    """Launch a sum of ones on the device."""
    tensor = put(torch.ones(elements), dist.device)
    return dist.all_reduce(tensor, op="sum", group=group, async_op=True)


def run(size: int, body: Callable[[Dist], object], seed: int = 0) -> list[object]:
    """What each rank returns, or raises."""
    return on_process_groups(size, body, local_size=size, seed=seed, return_errors=True)


def two(dist: Dist) -> list[Group]:
    """Two groups of all ranks, with their communicators."""
    made = [dist.new_group(None, group_desc=name) for name in ("a", "b")]
    groups = [group for group in made if group is not None]
    for group in groups:
        start(dist, group).wait(SOON)
    return groups


def test_a_collective_ends_when_all_ranks_have_launched_it() -> None:
    def body(dist: Dist) -> tuple[bool, list[float]]:
        (group, _), tensor = two(dist), put(torch.full((2,), dist.rank + 1.0), dist.device)
        if dist.rank == 1:
            dist.machine.hosts.wait(1, lambda: bool(dist.machine.queues[0]), "the other one to launch")
            assert not dist.machine.queues[0][0].has_ended
        work = dist.all_reduce(tensor, op="sum", group=group, async_op=True)
        ended = work.is_completed()
        work.wait()
        torch.accelerator.synchronize()
        return ended or work.is_completed(), tensor.host.tolist()

    for seed in range(3):
        assert run(2, body, seed) == [(True, [3.0, 3.0])] * 2


@pytest.mark.parametrize("alike", [True, False])
def test_two_communicators_in_two_orders_are_a_deadlock(alike: bool) -> None:
    def body(dist: Dist) -> str:
        groups = two(dist)
        for group in groups if alike or dist.rank == 0 else reversed(groups):
            start(dist, group).wait()  # on the stream: the host goes on
        torch.accelerator.synchronize()
        return "through"

    found = run(2, body)
    assert found == ["through"] * 2 if alike else [type(one) for one in found] == [Stuck] * 2
    assert alike or "rank 0 waits for synchronize behind its device; rank 1 waits for synchronize" in str(found[0])


def test_to_make_a_communicator_waits_for_kernels_that_wait_for_others() -> None:
    """The circle of four ranks that two levels made: those that have launched more cannot come to the meeting."""

    def body(dist: Dist) -> str:
        (inside, _) = two(dist)
        across = dist.new_group(None, group_desc="across")
        assert across is not None
        if dist.rank in (1, 2):
            start(dist, inside)
        start(dist, across)
        return "through"

    assert [type(one) for one in run(4, body)] == [Stuck] * 4


@pytest.mark.parametrize("together", [True, False])
def test_to_destroy_a_communicator_takes_all_of_its_ranks(together: bool) -> None:
    def body(dist: Dist) -> str:
        first, second = two(dist)
        if together or dist.rank == 0:
            dist.destroy_process_group(first)
        start(dist, second).wait(SOON)
        return "through"

    found = run(2, body)
    assert found == ["through"] * 2 if together else isinstance(found[0], Stuck) and "Timed out" in str(found[1])


@pytest.mark.parametrize("seed", range(4))
def test_memory_of_a_new_size_waits_for_kernels_and_what_was_freed_does_not(seed: int) -> None:
    done: list[str] = []

    def body(dist: Dist) -> None:
        group, _ = two(dist)
        torch.zeros(1000, device=PLACE)  # is freed at once
        if dist.rank == 1:
            dist.machine.hosts.wait(1, lambda: bool(done), "what was freed to be used again")
            done.append("the other one launches")
        start(dist, group)
        if dist.rank == 0:
            torch.zeros(1000, device=PLACE)
            done.append("has memory that was freed")
            torch.zeros(2000, device=PLACE)
            done.append("has memory of the driver")

    assert run(2, body, seed) == [None] * 2
    assert done == ["has memory that was freed", "the other one launches", "has memory of the driver"]


def test_a_wait_with_a_deadline_ends_in_virtual_time() -> None:
    def body(dist: Dist) -> str:
        group, _ = two(dist)
        if dist.rank == 0:
            work = start(dist, group)
            with pytest.raises(RuntimeError, match="Timed out"):
                work.wait(timedelta(days=1))
            group.abort()
        torch.accelerator.synchronize()
        return "through"

    assert run(2, body) == ["through"] * 2


def test_the_same_seed_is_the_same_order_of_events() -> None:
    order: list[int] = []

    def body(dist: Dist) -> None:
        for _ in range(20):
            dist.machine.hosts.pause(dist.rank)
            order.append(dist.rank)

    for seed in (0, 0, 1):
        run(3, body, seed)
    assert order[:60] == order[60:120] != order[120:]
