"""Marks in time: making one waits for nothing, asking what lies between two may."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from agmerge.metrics.step_times import DeviceClock, HostClock, clock_for

CPU, META = torch.device("cpu"), torch.device("meta")
CUDA = torch.device("cuda", 0)


class Event:
    """A device event whose stream gets to it when somebody waits, at the times of ``script``."""

    script: list[float] = []
    log: list[str] = []

    def __init__(self, device: torch.device, *, enable_timing: bool = False) -> None:
        assert device == CUDA and enable_timing
        self.at: float | None = None
        self.recorded = False

    def record(self) -> None:
        self.recorded = True
        Event.log.append("record")

    def synchronize(self) -> None:
        assert self.recorded
        Event.log.append("synchronize")
        self.at = Event.script.pop(0) if self.at is None else self.at

    def elapsed_time(self, end: Event) -> float:
        assert end.at is not None, "not waited for"
        if self.at is None:  # what was recorded before has been reached too
            self.at = 0.0
        return 1e3 * (end.at - self.at)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> DeviceClock:
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(Event, "log", [])
    monkeypatch.setattr(Event, "script", [])
    return DeviceClock(CUDA)


def test_the_host_reads_seconds_off_the_processes_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    script = iter([5.0, 5.25, 7.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(script))
    clock = HostClock()
    origin, *marks = [clock.mark() for _ in range(3)]
    found = clock.since(origin, marks)
    assert found.dtype == np.float64 and found.tolist() == [0.25, 2.0]


def test_marks_of_a_device_are_recorded_and_not_waited_for(device: DeviceClock) -> None:
    for _ in range(5):
        device.mark()
    assert Event.log == ["record"] * 5


def test_asking_a_device_waits_for_every_mark_and_gives_seconds(device: DeviceClock) -> None:
    origin, *marks = [device.mark() for _ in range(4)]
    Event.script += [0.5, 2.0, 2.5]
    found = device.since(origin, marks)
    assert found.dtype == np.float64 and found.tolist() == [0.5, 2.0, 2.5]
    assert Event.log[4:] == ["synchronize"] * 3


def test_a_mark_may_be_asked_about_again_from_another_origin(device: DeviceClock) -> None:
    marks = [device.mark() for _ in range(3)]
    Event.script += [1.0, 4.0, 9.0]
    device.since(marks[0], marks)
    assert device.since(marks[1], marks[1:]).tolist() == [0.0, 5.0]


@pytest.mark.parametrize("clock", [HostClock(), DeviceClock(CUDA)], ids=["host", "device"])
def test_no_marks_lie_nowhere(clock: HostClock | DeviceClock) -> None:
    found = clock.since(0.0, [])  # type: ignore[arg-type]
    assert found.shape == (0,) and found.dtype == np.float64


def test_one_device_has_a_time_of_its_own(device: DeviceClock) -> None:
    clock = clock_for(torch.device("cuda", 0) for _ in range(3))
    assert isinstance(clock, DeviceClock)
    clock.mark()  # of that device: the event says so


@pytest.mark.parametrize(
    "devices",
    [[CPU], [CPU, CPU], [META], [CUDA, torch.device("cuda", 1)], [CUDA, CPU], []],
    ids=["cpu", "cpu twice", "meta", "two devices", "a device and the host", "none"],
)
def test_the_host_and_devices_without_a_common_time_go_by_the_hosts(devices: list[torch.device]) -> None:
    assert isinstance(clock_for(devices), HostClock)
