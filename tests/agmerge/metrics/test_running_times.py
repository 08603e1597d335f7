# SPDX-License-Identifier: Apache-2.0
"""Medians over the last steps, which are read one step late."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from agmerge.backends.streams import CudaStreams
from agmerge.metrics.chrome_trace import Trace
from agmerge.metrics.running_times import ENOUGH, KEEP, RunningStepTimes
from agmerge.metrics.step_times import Seconds, StepRecorder, StepTimes, StoppedClock
from agmerge.step.group import DeviceClock, HostClock


def times_of(ready: Sequence[float], travel: Sequence[float]) -> StepTimes:
    """A step in which tensors were ready then, and exchanges took so long, all of it waited for."""
    n = np.array(ready, dtype=np.float64)
    handed = 100.0 * np.arange(len(travel), dtype=np.float64)
    received: Seconds = handed + np.array(travel, dtype=np.float64)
    return StepTimes(n, n + 1.0, handed - 1.0, handed, handed, received, received + 1.0, received)


class Done(StepRecorder):
    """A recorder of a step that is known. ``read``: how often it was asked."""

    def __init__(self, times: StepTimes) -> None:
        super().__init__(HostClock(), 0, 0)
        self._times, self.read = times, 0

    def times(self) -> StepTimes:
        self.read += 1
        return self._times


def averages_of(steps: Sequence[StepTimes]) -> RunningStepTimes:
    averages = RunningStepTimes()
    for times in steps:
        averages.observe(Done(times))
    return averages


def test_a_step_is_read_when_the_next_one_comes_and_once() -> None:
    recorders = [Done(times_of([1.0], [1.0])) for _ in range(4)]
    averages = RunningStepTimes()
    for number, recorder in enumerate(recorders):
        averages.observe(recorder)
        assert [one.read for one in recorders] == [1] * number + [0] * (4 - number)
        assert len(averages.steps) == number
    averages.settle()
    averages.settle()
    assert [one.read for one in recorders] == [1] * 4 and len(averages.steps) == 4


def test_with_a_dear_clock_a_few_steps_of_each_average_are_measured_and_all_that_are_traced() -> None:
    averages, host, device = RunningStepTimes(), HostClock(), DeviceClock(torch.device("cuda"), CudaStreams())
    for _ in range(ENOUGH):
        assert averages.measures_next(device)
        averages.observe(Done(times_of([1.0], [1.0])))
    assert averages.measures_next(host) and not averages.measures_next(device)
    averages.observe(StepRecorder(StoppedClock(), 0, 0))  # nothing is read of it
    averages.settle()
    assert len(averages.steps) == ENOUGH
    averages.record(Trace(0, "rank 0"))
    assert averages.measures_next(device)
    averages.record(None)
    assert not averages.measures_next(device)
    averages.restart()
    assert averages.measures_next(device)


@pytest.mark.parametrize("ask", ["ready", "making", "travel", "typical", "restart", "forget"])
def test_who_asks_gets_the_last_step_too(ask: str) -> None:
    averages, last = RunningStepTimes(), Done(times_of([1.0], [5.0]))
    averages.observe(last)
    getattr(averages, ask)()
    assert last.read == 1 and averages.exposed == 5.0


def test_readiness_is_the_median_of_the_steps() -> None:
    averages = averages_of([times_of([0.0, later], [1.0]) for later in (3.0, 100.0, 1.0)])
    assert averages.ready().tolist() == [0.0, 3.0]
    averages.observe(Done(times_of([0.0, 4.0], [1.0])))
    assert averages.ready().tolist() == [0.0, 3.5]


def test_readiness_never_falls_though_tensors_change_places() -> None:
    averages = averages_of([times_of([0.0, 5.0, 2.0, 7.0, 6.0], [1.0])] * 3)
    assert averages.ready().tolist() == [0.0, 5.0, 5.0, 7.0, 7.0]


def test_a_travel_is_the_median_of_the_steps() -> None:
    averages = averages_of([times_of([0.0], row) for row in ([4.0, 1.0], [6.0, 5.0], [90.0, 2.0])])
    assert averages.travel().tolist() == [6.0, 2.0] and averages.making().tolist() == [1.0, 1.0]
    averages.restart()
    assert averages.making().tolist() == [1.0, 1.0]  # until there is a step, as it was


def test_a_new_beginning_forgets_all_but_what_was_waited_in_all() -> None:
    averages = averages_of([times_of([9.0], [2.0])] * 3)
    averages.forget()
    assert averages.steps == [] and averages.exposed == 6.0 and averages.typical() is None
    averages.observe(Done(times_of([1.0, 2.0], [3.0, 4.0])))  # another plan of other tensors
    assert averages.ready().tolist() == [1.0, 2.0] and averages.travel().tolist() == [3.0, 4.0]
    assert averages.exposed == 13.0


def test_a_new_average_under_the_same_plan_remembers_what_was_typical() -> None:
    averages = averages_of([times_of([later], [1.0]) for later in (1.0, 3.0, 8.0)])
    averages.restart()
    assert averages.steps == []
    before = averages.typical()
    assert before is not None and before.ready.tolist() == [3.0]
    averages.observe(Done(times_of([20.0], [1.0])))
    now = averages.typical()
    assert now is not None and now.ready.tolist() == averages.ready().tolist() == [20.0]
    averages.restart()
    averages.restart()  # two in a row lose nothing
    again = averages.typical()
    assert again is not None and again.ready.tolist() == [20.0]


def test_only_the_last_steps_count() -> None:
    averages = averages_of([times_of([900.0], [1.0])] * KEEP + [times_of([1.0], [1.0])] * KEEP)
    averages.settle()
    assert len(averages.steps) == KEEP and averages.ready().tolist() == [1.0]
    assert averages.exposed == 2 * KEEP


def test_the_typical_step_is_the_median_of_every_mark() -> None:
    found = averages_of([times_of([0.0, later], [later, 7.0]) for later in (1.0, 8.0, 2.0)]).typical()
    expected = times_of([0.0, 2.0], [2.0, 7.0])
    assert found is not None and RunningStepTimes().typical() is None
    for name in StepTimes.__dataclass_fields__:
        assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name
