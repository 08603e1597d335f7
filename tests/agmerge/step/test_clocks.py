# SPDX-License-Identifier: Apache-2.0
"""Marks in time: making one waits for nothing, asking what lies between two may."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from support.recorded_cuda import RATE, Cuda

from agmerge.backends.streams import CudaStreams
from agmerge.metrics.step_times import Clock, Event, StepRecorder
from agmerge.step.group import DeviceClock, HostClock, clock_for

CPU, META = torch.device("cpu"), torch.device("meta")
CUDA = torch.device("cuda", 1)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """Two GPUs, of which the script has set none: the current one is the first."""
    made = Cuda()
    made.install(monkeypatch)
    return made


@pytest.fixture
def clock(cuda: Cuda) -> DeviceClock:
    return DeviceClock(CUDA, CudaStreams())


def spin(cuda: Cuda, seconds: float) -> None:
    """Give the clock's device so much to do."""
    with cuda.stream(cuda.current_stream(CUDA)):
        cuda.spin(int(seconds * RATE))


def test_the_host_reads_seconds_off_the_processes_own_clock() -> None:
    clock = HostClock()
    before, mark, after = time.perf_counter(), clock.mark(), time.perf_counter()
    assert before <= mark <= after
    found = clock.since(5.0, [5.25, 7.0])
    assert found.dtype == np.float64 and found.tolist() == [0.25, 2.0]


def test_marks_of_a_device_are_recorded_there_and_not_waited_for(cuda: Cuda, clock: DeviceClock) -> None:
    spin(cuda, 3.0)
    for _ in range(5):
        clock.mark()
    assert cuda.log[1:] == ["record on 1"] * 5 and cuda.now == 0.0


def test_marks_of_the_main_thread_and_of_hooks_can_be_compared(cuda: Cuda, clock: DeviceClock) -> None:
    origin = clock.mark()  # the current device is another one
    spin(cuda, 2.0)
    cuda.set_device(1)  # as autograd does in its threads
    assert clock.since(origin, [clock.mark()]).tolist() == [2.0]


def test_asking_a_device_waits_for_every_mark_and_gives_seconds(cuda: Cuda, clock: DeviceClock) -> None:
    spin(cuda, 1.0)
    marks = [clock.mark()]
    for seconds in (0.5, 1.5, 0.5):
        spin(cuda, seconds)
        marks.append(clock.mark())
    found = clock.since(marks[0], marks[1:])
    assert found.dtype == np.float64 and found.tolist() == [0.5, 2.0, 2.5]
    assert cuda.now == 3.5
    assert clock.since(marks[1], marks[2:]).tolist() == [1.5, 2.0]  # another origin


@pytest.mark.parametrize("clock", [HostClock(), DeviceClock(CUDA, CudaStreams())], ids=["host", "device"])
def test_no_marks_lie_nowhere(clock: Clock) -> None:
    found = clock.since(0.0, [])
    assert found.shape == (0,) and found.dtype == np.float64


def test_one_device_has_a_time_of_its_own(cuda: Cuda) -> None:
    clock = clock_for(CUDA for _ in range(3))
    assert isinstance(clock, DeviceClock)
    clock.mark()
    assert cuda.log == ["record on 1"]


@pytest.mark.parametrize(
    "devices",
    [[CPU], [CPU, CPU], [META], [CUDA, torch.device("cuda", 0)], [CUDA, CPU], []],
    ids=["cpu", "cpu twice", "meta", "two devices", "a device and the host", "none"],
)
def test_the_host_and_devices_without_a_common_time_go_by_the_hosts(devices: list[torch.device]) -> None:
    assert isinstance(clock_for(devices), HostClock)


def test_what_the_host_sees_of_a_device_says_nothing_of_when_messages_arrived(cuda: Cuda, clock: DeviceClock) -> None:
    recorder = StepRecorder(clock, 1, 2)
    recorder.begin()
    for event in (Event.READY, Event.RESUMED):
        recorder.note((event, 0, recorder.now()))
    for buffer in range(2):
        for _ in range(5):
            recorder.note((Event.REACHED, buffer, recorder.now()))
            spin(cuda, 1.0)
    times = recorder.times()
    assert times.arrived.tolist() == times.received.tolist() == [3.0, 8.0]
    assert times.travel.tolist() == [2.0, 2.0]
