# SPDX-License-Identifier: Apache-2.0
"""The pretended device by itself: what it counts, and what it takes for a wait."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pretend.device import Device
from pretend.tensors import DeviceTensor, put


def on(device: Device, *values: float) -> torch.Tensor:
    """A tensor of the device, without a copy."""
    return put(torch.tensor(values, dtype=torch.float32), device)


def test_tensors_say_that_they_are_on_the_device_and_compute_what_the_host_would(device: Device) -> None:
    a = torch.zeros(4, device="pretend:0")
    a[1:3] += on(device, 1.0, 2.0)
    assert isinstance(a, DeviceTensor) and not a.is_cpu and a.device == torch.device("pretend:0")
    assert a.host.tolist() == [0.0, 1.0, 2.0, 0.0]


def test_kernels_and_their_bytes_are_counted_and_views_are_not(device: Device) -> None:
    a, b = on(device, *range(8)), on(device, *range(8))
    a.view(2, 4)[0].add_(b[:4])
    assert [(one.operation, one.kernels, one.bytes) for one in device.books.launches] == [("add_", 1, 3 * 4 * 4)]


def test_what_touches_a_part_is_counted_by_that_part(device: Device) -> None:
    a, places = on(device, *range(100)), put(torch.tensor([3, 5]), device)
    a.index_select(0, places)
    assert device.books.launches[0].bytes == 2 * (4 + 8 + 4)


def test_a_multi_tensor_kernel_takes_so_many_tensors_at_once(device: Device) -> None:
    many = [on(device, 1.0) for _ in range(111)]
    torch._foreach_mul_(many, 2.0)
    assert [one.kernels for one in device.books.launches] == [2]


@pytest.mark.parametrize(
    "look",
    [
        lambda a: a[0].item(),
        lambda a: a.tolist(),
        lambda a: bool(a.any()),
        lambda a: a[a > 1],
        lambda a: a.nonzero(),
        lambda a: a.unique(),
        lambda a: a.cpu(),
        lambda a: torch.tensor([1.0, 2.0], device=a.device),
        lambda a: a.copy_(torch.ones(3)),
        lambda a: a.copy_(torch.ones(3), non_blocking=True),  # pageable
        lambda a: torch.zeros(3).copy_(a),
        lambda a: torch.accelerator.synchronize(a.device),
    ],
)
def test_what_gives_the_host_a_value_is_a_wait(device: Device, look: Callable[[torch.Tensor], object]) -> None:
    a = on(device, 1.0, 2.0, 3.0)
    a += 1
    look(a)
    assert len(device.books.waits) == 1


def test_copies_of_pinned_memory_that_do_not_block_are_none(device: Device) -> None:
    a, pinned = on(device, 1.0, 2.0), device.pinned.allocate(2, torch.float32)
    a.copy_(pinned, non_blocking=True)
    pinned.copy_(a, non_blocking=True)
    assert not device.books.waits


def test_an_event_whose_kernels_have_been_waited_for_is_none(device: Device) -> None:
    a, event = on(device, 1.0), torch.Event("pretend:0", enable_timing=True)
    a += 1
    event.record()
    event.synchronize()
    event.synchronize()
    assert [wait.what for wait in device.books.waits] == ["Event.synchronize"]


def test_versions_are_counted_as_elsewhere(device: Device) -> None:
    a = on(device, 1.0, 2.0)
    view = a[:1]
    a += 1
    assert view._version == a._version == 1
