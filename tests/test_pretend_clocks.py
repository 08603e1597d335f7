# SPDX-License-Identifier: Apache-2.0
"""The race check by itself: what events order, and what nothing does."""

from __future__ import annotations

import time

import pytest
import torch
from pretend import kernels
from pretend.device import Device
from pretend.tensors import put
from torch import Tensor

from agmerge.backends.streams import Streams, streams_of


@pytest.fixture
def offered(device: Device) -> Streams:
    """What the library is offered of it."""
    found = streams_of(torch.device("pretend:0"))
    assert found is not None
    return found


def zeros(device: Device, count: int = 8) -> Tensor:
    """A tensor of the device that nothing was done to."""
    return put(torch.zeros(count), device)


def test_the_host_has_no_streams() -> None:
    assert streams_of(torch.device("cpu")) is None


def test_two_streams_that_write_the_same_bytes_race(device: Device, offered: Streams) -> None:
    a, side = zeros(device), offered.new(torch.device("pretend:0"))
    a += 1
    with offered.within(side):
        a[3:].add_(1)
    (race,) = device.books.races
    assert "default writes bytes 0 to 32" in race.first and "lane writes bytes 12 to 32" in race.second


@pytest.mark.parametrize("first, second", [(slice(0, 4), slice(4, 8)), (slice(0, 8), slice(0, 8))])
def test_other_bytes_and_reads_do_not_race(device: Device, offered: Streams, first: slice, second: slice) -> None:
    a, side = zeros(device), offered.new(torch.device("pretend:0"))
    apart = first != second
    (a[first].add_(1) if apart else a[first] + 1)
    with offered.within(side):
        (a[second].add_(1) if apart else a[second] + 1)
    assert device.books.races == []


def test_an_event_orders_what_was_queued_before_it_and_no_more(device: Device, offered: Streams) -> None:
    a, b, side = zeros(device), zeros(device), offered.new(torch.device("pretend:0"))
    a += 1
    event = offered.record(offered.current(a.device))
    b += 1
    offered.wait(side, event)
    with offered.within(side):
        a += 1
        assert device.books.races == []
        b += 1
    assert len(device.books.races) == 1


def test_order_is_handed_on_from_stream_to_stream(device: Device, offered: Streams) -> None:
    a, place = zeros(device), torch.device("pretend:0")
    second, third = offered.new(place), offered.new(place)
    a += 1
    offered.wait(second, offered.record(offered.current(place)))
    offered.wait(third, offered.record(second))
    with offered.within(third):
        a += 1
    assert device.books.races == []


def test_what_the_host_has_waited_for_is_before_all_that_it_queues(device: Device, offered: Streams) -> None:
    a, side = zeros(device), offered.new(torch.device("pretend:0"))
    a += 1
    a.tolist()
    with offered.within(side):
        a += 1
    assert device.books.races == []


def test_memory_that_is_freed_while_another_stream_uses_it_is_a_race(device: Device, offered: Streams) -> None:
    for joined in (True, False):
        a, side = zeros(device), offered.new(torch.device("pretend:0"))
        offered.wait(side, offered.record(offered.current(a.device)))
        with offered.within(side):
            a.add_(1)
        if joined:
            offered.wait(offered.current(a.device), offered.record(side))
        del a
        assert len(device.books.races) == (not joined)


def test_what_a_copy_brings_is_there_once_the_host_has_waited(device: Device, offered: Streams) -> None:
    a, pinned = zeros(device) + 7, offered.pinned(8, torch.float32)
    pinned.copy_(a, non_blocking=True)
    brought = a.to("cpu", non_blocking=True)
    assert pinned.tolist() == brought.tolist() == [0.0] * 8
    assert offered.wait_on_host(offered.record(offered.current(a.device)), 1.0)
    assert pinned.tolist() == brought.tolist() == [7.0] * 8


@pytest.mark.parametrize("is_early", [True, False])
def test_memory_that_is_written_before_the_device_has_read_it_is_a_race(
    device: Device, offered: Streams, is_early: bool
) -> None:
    a, pinned = zeros(device), offered.pinned(8, torch.float32)
    a.copy_(pinned, non_blocking=True)
    if is_early:
        pinned += 1
    offered.wait_on_host(offered.record(offered.current(a.device)), 1.0)
    pinned += 1
    assert len(device.books.races) == is_early


def test_an_event_that_never_comes_ends_the_wait(
    device: Device, offered: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(type(offered), "has_ended", lambda self, event: False)
    monkeypatch.setattr(time, "monotonic", lambda: sum(slept))
    monkeypatch.setattr(time, "sleep", slept.append)
    assert not Streams.wait_on_host(offered, "an event", 1.0)
    assert 1.0 < sum(slept) <= 1.001
    assert slept == sorted(slept) and slept[-1] == 1e-3  # it looks less often as time goes on
    came = next(number for number, _ in enumerate(slept) if sum(slept[:number]) > 0.01)
    assert slept[came] <= 1.1e-4  # what comes after 10 ms is seen within a hundredth of that


def test_the_library_is_told_what_is_captured(device: Device, offered: Streams) -> None:
    with device.capturing():
        assert offered.is_capturing()
    assert not offered.is_capturing()


def test_a_fused_kernel_is_one_launch_with_its_own_bytes_and_its_accesses(device: Device, offered: Streams) -> None:
    class Reference:
        @staticmethod
        def halve_and_add(a: Tensor, b: Tensor) -> Tensor:
            return a.mul_(0.5).add_(b)

    with kernels.one_launch(Reference, "halve_and_add", lambda a, b: 12 * a.numel()):
        a, b, side = zeros(device), zeros(device), offered.new(torch.device("pretend:0"))
        b += 1
        device.books.clear()
        with offered.within(side):
            Reference.halve_and_add(a, b)
    assert [(one.operation, one.kernels, one.bytes) for one in device.books.launches] == [("halve_and_add", 1, 96)]
    assert len(device.books.races) == 1  # of what it reads
