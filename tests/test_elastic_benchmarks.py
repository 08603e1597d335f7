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
from lab import network
from recovery.contenders import CONTENDERS, WORKERS, Contender
from recovery.goodput import ClockTurn, goodput, pace
from recovery.turn import Line, Pause, Turn, beyond, pause, repeated, timeline, usual

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


def test_lines_of_all_workers_are_read_by_time_and_unfinished_ones_are_left(tmp_path: Path) -> None:
    (tmp_path / "3.lines").write_text("[2.0, 1, 3, 1]\n[4.0, 2, 3")
    (tmp_path / "5.lines").write_text("[1.0, 1, 3, 1]\n")
    assert timeline(tmp_path) == [Line(1.0, 5, 1, 3, 1), Line(2.0, 3, 1, 3, 1)]


def test_a_job_that_ends_by_itself_is_reported_with_what_it_said(tmp_path: Path) -> None:
    class Broken(Contender):
        """Job whose only worker ends at once."""

        def start(self) -> None:
            self.launch(sys.executable, "-c", "print('no such model')")

        def replace(self) -> None:
            raise NotImplementedError

    found = Turn(Broken(tmp_path, "mlp", 5), patience=60, seed=0).run(kills=1, steps=2)
    assert "has ended" in found["failed"] and found["deaths"] == []
    assert elastic_others.row("broken", [found]) == ["broken", found["failed"].splitlines()[0]]


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


def test_goodput_counts_steps_that_are_made_again_once_and_one_pace_where_no_other_is_known() -> None:
    again = [Line(10.0 + n, pid, 3 + n, 3, 1 + n) for n in range(3) for pid in (17, 18, 19)]
    found = goodput([*STEADY, *again], began=1.0, kills=[4.5], paces={3: 1.0})
    assert found == {"gained": 4, "seconds": 11.0, "fewer": 5.5, "possible": 11.0, "paused": 5.0, "goodput": 4 / 11}
    lost = goodput([*STEADY, *(Line(10.0, pid, 1, 3, 1) for pid in (17, 18, 19))], 2.0, [4.5], {3: 1.0})
    assert lost["gained"] == -1 and lost["goodput"] == 0


def test_a_pace_is_the_mean_of_one_worker_s_steps() -> None:
    assert pace([Line(1.0, 7, 1, 3, 1), Line(1.5, 8, 1, 3, 1), Line(2.0, 7, 2, 3, 2), Line(7.0, 7, 4, 3, 5)]) == 2.0


@pytest.mark.long
@pytest.mark.timeout(100)
@pytest.mark.parametrize("alone", [False, True])
def test_workers_are_killed_by_the_clock_and_replaced_at_once(tmp_path: Path, alone: bool) -> None:
    """A step lasts 20 ms, whoever makes it, and its number is that of the clock."""
    script = """if True:
        import json, os, sys, time
        file, workers = open(f"{sys.argv[1]}/{os.getpid()}.lines", "a"), int(sys.argv[2])
        while os.path.exists(sys.argv[1]):
            time.sleep(0.02)
            print(json.dumps([time.monotonic(), int(time.monotonic() * 50), workers, 1]), file=file, flush=True)
    """
    (folder := tmp_path / "job").mkdir()

    class Quick(Contender):
        """Job of workers that do nothing but write lines; the first three of them write that they are two."""

        replaces = alone  # and yet nobody replaces them

        def start(self) -> None:
            for _ in range(WORKERS):
                self.replace(2)

        def replace(self, workers: int = 3) -> None:
            self.launch(sys.executable, "-S", "-c", script, str(self.folder), str(workers))

    job = Quick(folder, "mlp", 5)
    turn = ClockTurn(job, patience=5 if alone else 30, seed=0, every=1.0)
    found = turn.run_by_clock(steps=5, ticks=3)
    folder.rename(tmp_path / "done")  # which ends the workers
    if alone:  # the first death is the last one, and three never work again
        assert (found["kills"], found["skipped"]) == (1, 2) and "no 5 steps of 3 workers" in found["failed"]
        return
    assert "failed" not in found and found["kills"] + found["skipped"] == 3 and found["kills"] >= 1
    assert found["goodput"] == pytest.approx(1, abs=0.5) and 0 < found["fewer"] < found["seconds"]
    assert set(found["paces"]) == {2, 3} and found["seconds"] == pytest.approx(3, abs=1)


def test_a_row_of_kills_by_the_clock_has_medians_of_the_turns_that_ended_well() -> None:
    turn = {"goodput": 0.91, "gained": 300, "seconds": 600.0, "kills": 10, "skipped": 0, "paused": 30.0}
    turn |= {"paces": {"3": 2.0, "2": 1.5}, "megabytes": [4.0, 6.0]}
    other = {**turn, "goodput": 0.95, "paces": {"3": 3.0}}
    assert elastic_others.row_by_clock("x", [turn, other, {"failed": "too late\nlog"}]) == [
        "x", "0.930", "30.0", "10", "0", "5.0", "2.50", "1.50", "5.0", "failed 1 of 3 turns: too late",
    ]  # fmt: skip
    assert elastic_others.row_by_clock("x", [{"failed": "too late\nlog"}]) == ["x", "too late"]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_each_contender_that_is_here_takes_its_turn(tmp_path: Path) -> None:
    if why := network.usable():
        pytest.skip(why)
    here = [name for name, kind in CONTENDERS.items() if name in ("agmerge", "torchrun") or not kind.missing()]
    arguments = ["--kills", "1", "--turns", "1", "--steps", "2", "--model", "mlp", "--rate", "", "--suspect", "30"]
    found = run("elastic_others.py", *arguments, "--only", ",".join(here))["found"]
    assert all("failed" not in turn and len(turn["deaths"]) == 1 for (turn,) in found.values()), found
    assert found["agmerge"][0]["repeated"] == [0] and found["torchrun"][0]["repeated"][0] >= 1
    clock = ["--every", "20", "--minutes", "0.6", "--file-every", "5", "--only", "agmerge,torchrun"]
    found = run("elastic_others.py", *arguments, *clock)["found"]
    assert all(turn["kills"] >= 1 and turn["kills"] + turn["skipped"] == 2 for (turn,) in found.values()), found


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("setting", ["default", "dgc", "updates"])
def test_the_uninterrupted_training_sees_as_many_batches(setting: str) -> None:
    arguments = ["--setting", setting, "--seeds", "1", "--steps", "800", "--every", "400", "--later", "50"]
    (pair,) = run("elastic_training.py", *arguments, "--workers", "2")["pairs"]
    assert pair["killed"]["killed"] == pair["killed"]["arrived"] == 1 and pair["killed"]["steps of fewer"] >= 40
    equal, last = pair["alone"]["steps"]
    assert abs(2 * equal - pair["killed"]["batches"]) <= 1 and equal < last == 800
    assert 0.5 < pair["ratio"] < pair["same steps"] < 2  # it goes on learning in the steps between


def run(name: str, *arguments: str) -> dict[str, object]:
    """Run a benchmark; return what its last line says."""
    command = [sys.executable, str(BENCHMARKS / name), *arguments]
    variables = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=390, env=variables, cwd=BENCHMARKS.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found
