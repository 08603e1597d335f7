# SPDX-License-Identifier: Apache-2.0
"""Side streams by device: one each, kept over agreements; a device that is not the process's own is said once."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from pretend.clocks import Stream as PretendedStream
from pretend.device import Device
from pretend.streams import DeviceStreams
from pretend.tensors import PLACE
from pretend.training import on_devices
from support.device_training import Given, plain_step, train, wrapped
from support.recorded_cuda import Cuda, Stream

from agmerge.step.group import SideStreams

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    made.install(monkeypatch)
    return made


def used(side: SideStreams, cuda: Cuda, device: torch.device) -> Stream:
    """The stream of a device that work is queued into."""
    with side.within():
        return cuda.current_stream(device)


def test_a_device_keeps_its_stream_when_ranks_agree_again(cuda: Cuda) -> None:
    side = SideStreams()
    side.serve([FIRST])
    kept = used(side, cuda, FIRST)
    assert kept is not cuda.current_stream(FIRST) and kept.priority == -1
    for devices in ([FIRST], [FIRST, torch.device("cpu")], [torch.device("cpu")], [FIRST, SECOND]):
        side.serve(devices)
    assert used(side, cuda, FIRST) is kept and used(side, cuda, SECOND).device_index == 1


def test_a_device_that_no_tensor_lies_on_any_more_is_left_alone(cuda: Cuda) -> None:
    side = SideStreams()
    side.serve([FIRST, SECOND])
    side.serve([FIRST])
    assert used(side, cuda, SECOND) is cuda.current_stream(SECOND)


@pytest.mark.parametrize(
    "current, devices, says", [(0, [SECOND], True), (1, [SECOND], False), (1, [FIRST, SECOND], False)]
)
def test_tensors_on_another_device_than_the_processes_own_are_told_once(
    cuda: Cuda, current: int, devices: list[torch.device], says: bool
) -> None:
    cuda.set_device(current)
    side = SideStreams()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        side.serve(devices)
        side.serve(devices)
    assert [str(one.message).startswith("AGM703: ") for one in said] == [True] * says


def test_an_exchange_works_in_one_stream_of_its_device_over_all_agreements(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(Device, "new_stream", lambda self, name: made.append(name) or PretendedStream(name))

    def each(optimizer: Any, model: Given, rank: int, step: int) -> None:
        model.given[1].requires_grad_(step != 1)  # a tensor leaves, and comes again
        plain_step(optimizer, model, rank, step)

    train(1, each=each, merging="layerwise")
    assert made.count("lane") == 1


def test_a_wrong_device_is_told_when_an_optimizer_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceStreams, "is_current", lambda self, device: False)

    def body(rank: int, device: Device) -> None:
        with pytest.warns(UserWarning, match=r"Call torch\.pretend\.set_device\(\) first"):
            wrapped(Given(PLACE))

    on_devices(1, body)
