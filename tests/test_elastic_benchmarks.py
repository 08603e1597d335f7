# SPDX-License-Identifier: Apache-2.0
"""What benchmarks of elastic training make of the lines that workers write; and, long, that they run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import elastic_others
import pytest
from recovery.goodput import goodput
from recovery.turn import Line, Pause, beyond, pause, repeated, usual

BENCHMARKS = Path(elastic_others.__file__).parent
STEADY = [Line(float(t), pid, t, 3, t) for t in range(1, 5) for pid in (7, 8, 9)]  # a step a second


def test_a_pause_is_the_longest_time_without_a_finished_step() -> None:
    """Worker 8 ends the step under way after the kill at 4.2; then nobody does before 9."""
    lines = [*STEADY, Line(4.5, 8, 5, 3, 5), Line(9.0, 7, 6, 2, 6), Line(9.1, 8, 6, 2, 6), Line(10.0, 7, 7, 2, 7)]
    assert pause(lines, since=4.2) == Pause(4.5, 9.0)
    assert beyond(lines, Pause(4.5, 9.0)) == pytest.approx(4.5 - 1.0)  # of two workers' steps
    early = [Line(-20.0, 7, 0, 3, 0), *lines]
    assert pause(early, since=4.2) == Pause(4.5, 9.0)


@pytest.mark.parametrize(
    "after, count",
    [
        (Line(9.0, 7, 5, 2, 5), 0),  # it repeats the exchange of the step under way
        (Line(9.0, 7, 5, 2, 6), 1),  # it makes the step under way again
        (Line(9.0, 7, 3, 2, 7), 4),  # two finished steps are lost: 3 and 4; so is the one under way, and one more
        (Line(9.0, 70, 5, 3, 1), 1),  # a new process goes on from a file of step 4
        (Line(9.0, 70, 3, 3, 1), 3),  # from one of step 2
        (Line(9.0, 70, 1, 3, 1), 5),  # from no file
    ],
)
def test_steps_begun_in_vain_are_counted_in_the_same_process_and_in_a_new_one(after: Line, count: int) -> None:
    assert repeated([*STEADY, after], Pause(4.0, 9.0)) == count


def test_a_usual_step_is_one_worker_s_without_a_change_and_two_workers_need_not_take_as_long_as_three() -> None:
    assert usual(STEADY) == 1.0
    slower = [Line(10.0 + 30 * n, 7, 10 + n, 2 + n % 2, 10 + n) for n in range(40)]  # a change at each step
    assert usual([*STEADY, *slower]) == 1.0
    two = [Line(8.0 + n / 2, 7, 5 + n, 2, 5 + n) for n in range(4)]
    assert beyond([*STEADY, *two], Pause(4.0, 8.0)) == 4.0 - 0.5


def test_a_row_has_medians_of_all_turns_and_says_how_many_failed() -> None:
    first = {"deaths": [1.0, 9.0], "from_kill": [3.0], "arrivals": [], "repeated": [0, 1], "steps": [2.0, 2.0]}
    second = {"deaths": [2.0], "from_kill": [5.0], "arrivals": [], "repeated": [1], "steps": [2.0]}
    first |= {"megabytes": [5.0], "failed": "too late\nlog"}
    second |= {"megabytes": [7.0], "useful": 30, "seconds": 120.0}
    assert elastic_others.row("x", [first, second]) == [
        "x", "2.0", "9.0", "4.0", "5.0", "-", "-", "1", "2.00", "6.0", "0.50", "15.0", "failed 1 of 2 turns: too late",
    ]  # fmt: skip


def test_goodput_is_what_was_gained_of_what_those_present_would_have_made() -> None:
    """Worker 9 is killed at 4.5; two others go on at 7.0 with half a second a step; 10 finishes its first at 10.5."""
    two = [Line(7.0 + n / 2, pid, 5 + n, 2, 5 + n) for n in range(4) for pid in (7, 8)]
    three = [Line(10.5 + n, pid, 9 + n, 3, 1 + n) for n in range(3) for pid in (7, 8, 10)]
    found = goodput([*STEADY, *two, *three], began=1.0, kills=[4.5], paces={3: 1.0, 2: 0.5})
    figures = {"gained": 10, "seconds": 11.5, "fewer": 6.0, "possible": 17.5, "paused": 2.0, "goodput": 10 / 17.5}
    assert found == figures
    early = goodput([*STEADY, *two], began=2.0, kills=[4.5], paces={3: 1.0, 2: 0.5})  # nobody has come until 8.5
    assert early == {"gained": 6, "seconds": 6.5, "fewer": 4.0, "possible": 10.5, "paused": 2.0, "goodput": 6 / 10.5}


def run(name: str, *arguments: str) -> dict[str, object]:
    """Run a benchmark; return what its last line says."""
    command = [sys.executable, str(BENCHMARKS / name), *arguments]
    variables = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=390, env=variables, cwd=BENCHMARKS.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found
