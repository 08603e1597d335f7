# SPDX-License-Identifier: Apache-2.0
"""When this process did not run, by a clock of the test's own."""

from __future__ import annotations

import threading
from collections import deque

import pytest

from agmerge.runtime.peers import status_server
from agmerge.runtime.peers.status_server import Pauses


class Clock:
    """Monotonic and CPU time of a process, as the test has them go on."""

    def __init__(self) -> None:
        self.now, self.cpu = 1000.0, 5.0
        self.stops_after = ""  # a clock: once it has been read, the process is stopped for 14 seconds

    def monotonic(self) -> float:
        return self._read("monotonic", self.now)

    def process_time(self) -> float:
        return self._read("process_time", self.cpu)

    def _read(self, clock: str, seconds: float) -> float:
        if self.stops_after == clock:
            self.stops_after = ""
            self.passes(14.0)
        return seconds

    def passes(self, seconds: float, cpu: float = 0.0) -> None:
        self.now, self.cpu = self.now + seconds, self.cpu + cpu


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(status_server, "time", made)
    return made


def running(clock: Clock, seconds: float = 10.0) -> Pauses:
    """A process that has run for ``seconds``."""
    made = Pauses()
    made.beat()
    for _ in range(int(2 * seconds)):
        clock.passes(0.5, cpu=0.4)
        made.beat()
    return made


def test_who_runs_was_not_stopped(clock: Clock) -> None:
    made = running(clock, 100.0)
    clock.passes(1.9)  # a busy machine
    made.beat()
    assert made.describe(0.0) == ""


@pytest.mark.parametrize("beats", [False, True])
def test_who_was_stopped_says_for_how_long(clock: Clock, beats: bool) -> None:
    """Also before the next beat: it may just have come to run again."""
    made = running(clock)
    clock.passes(14.0, cpu=0.01)
    if beats:
        made.beat()
    said = "did not run for 14.0 s: it was stopped (SIGSTOP, a debugger, a frozen container or machine)"
    assert made.describe(0.0) == said


def test_code_that_lets_no_other_thread_run_is_told_from_a_stop(clock: Clock) -> None:
    made = running(clock)
    clock.passes(14.0, cpu=13.0)
    made.beat()
    assert made.describe(0.0).endswith("it was stopped, or in code that lets no other thread run")


def test_only_pauses_that_ended_later_count(clock: Clock) -> None:
    made = running(clock)
    clock.passes(14.0)
    made.beat()
    moment = clock.now
    clock.passes(0.5)
    made.beat()
    assert made.describe(moment) == ""
    clock.passes(3.0)
    made.beat()
    assert made.describe(moment).startswith("did not run for 3.0 s")
    assert made.describe(0.0).startswith("did not run for 17.0 s")
    assert made.describe(0.0, least=18.0) == ""


def test_where_no_thread_beats_nothing_is_known(clock: Clock) -> None:
    made = Pauses()
    clock.passes(300.0)
    assert made.describe(0.0) == ""


def test_only_so_many_are_remembered(clock: Clock) -> None:
    made = running(clock)
    for _ in range(2 * status_server.REMEMBERED):
        clock.passes(3.0)
        made.beat()
    assert made.describe(0.0).startswith(f"did not run for {3.0 * status_server.REMEMBERED:.1f} s")


def test_a_pause_is_never_between_the_list_and_the_last_beat(clock: Clock) -> None:
    """A beat that is interrupted where it has read the clock: whoever asks then hears of the pause all the same."""
    made = running(clock)
    clock.passes(14.0, cpu=0.01)
    said: list[str] = []
    asking = threading.Thread(target=lambda: said.append(made.describe(0.0)))

    class Interrupting(deque[status_server.Pause]):
        def append(self, pause: status_server.Pause) -> None:
            asking.start()
            asking.join(0.2)
            super().append(pause)

    made._pauses = Interrupting()
    made.beat()
    asking.join()
    assert said[0].startswith("did not run for 14.0 s")


@pytest.mark.parametrize("reading", ["monotonic", "process_time"])
def test_a_stop_within_a_beat_counts(clock: Clock, reading: str) -> None:
    """The process is stopped just after a beat has read a clock."""
    made = running(clock)
    clock.stops_after = reading
    made.beat()
    made.beat()
    assert made.describe(0.0).startswith("did not run for 14.0 s")
