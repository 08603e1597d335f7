# SPDX-License-Identifier: Apache-2.0
"""Trainers of an elastic job decide alike, from what they evaluate: when to stop, and which model is the best one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from elastic_job import Job, job

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
SCRIPT = Path(__file__).parent / "trainer_deciding.py"


def said(here: Job, worker: subprocess.Popen[str], what: str) -> list[Any]:
    """Return what a worker has printed after a word."""
    lines = here.log(worker).splitlines()
    return [json.loads(line.removeprefix(what)) for line in lines if line.startswith(f"{what} ")]


def ends(here: Job, *workers: subprocess.Popen[str]) -> list[Any]:
    """Wait for workers, which end with the same model, and have decided alike; return how."""
    for worker in workers:
        assert worker.wait(200) == 0, here.logs()
    (first,), *others = (said(here, one, "ended") for one in workers)
    assert others == [[first]] * len(others), here.logs()
    evaluated: dict[int, Any] = {}
    for worker in workers:
        for step, *rest in said(here, worker, "evaluated"):
            assert evaluated.setdefault(step, rest) == rest, "metrics and buffers are the same"
    assert len({json.dumps(said(here, one, "alone")) for one in workers}) == 1
    assert here.differing() == {}
    return list(first[:3])


@pytest.mark.long
@pytest.mark.timeout(400)
def test_all_stop_early_at_one_step_with_the_best_model_of_the_oldest(tmp_path: Path) -> None:
    with job(tmp_path, {}, script=SCRIPT) as here:
        workers = [here.start(steps=40) for _ in range(2)]
        assert ends(here, *workers) == [10, "checkpoint-6", 6.0]


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("setting", [{}, {"sync": "updates", "density": 0.1}], ids=["default", "updates"])
@pytest.mark.parametrize("halts", ["evaluating", "saving"])
def test_the_next_oldest_decides_where_the_oldest_dies(tmp_path: Path, halts: str, setting: dict[str, Any]) -> None:
    """It dies in its evaluation, or with half a checkpoint; a newcomer comes, and learns of the best one."""
    given = {**setting, "halts": halts, "halts_at": 6, "best_at": 60}
    with job(tmp_path, given, script=SCRIPT) as here:
        workers = [here.start(steps=400) for _ in range(3)]
        here.wait_for((tmp_path / "halted").exists, 60)
        (oldest,) = (one for one in workers if str(one.pid) == (tmp_path / "halted").read_text())
        saved = tmp_path / "out" / "checkpoint-6" / "trainer_state.json"
        assert not saved.exists()
        newcomer = here.start(steps=400)
        here.wait_for(lambda: "waits to join the job of the lighthouse at" in here.log(newcomer), 60)
        oldest.kill()
        left = [one for one in workers if one is not oldest]
        here.wait_for(saved.exists)
        here.wait_for(lambda: here.size(newcomer) == 3, 60)
        assert here.lines(newcomer)[0][0] < 60, "it is let in before the best step"
        assert ends(here, *left, newcomer) == [64, "checkpoint-60", 60.0]
        assert len(said(here, left[0], "evaluated")) == 32


@pytest.mark.long
@pytest.mark.timeout(400)
def test_epochs_end_at_the_same_step_on_all_workers(tmp_path: Path) -> None:
    """Trainers count epochs by how many workers there were as they began; those of the data count."""
    given = {"training": {"eval_strategy": "epoch", "save_strategy": "epoch"}, "best_at": 24}
    with job(tmp_path, given, script=SCRIPT) as here:
        workers = [here.start(steps=400) for _ in range(2)]
        assert ends(here, *workers) == [36, "checkpoint-24", 24.0]
        assert [one[0] for one in said(here, workers[0], "evaluated")] == [6, 12, 18, 24, 30, 36]
