# SPDX-License-Identifier: Apache-2.0
"""A Trainer of transformers in an elastic job: workers are killed, come and leave, and the others' Trainers go on."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from elastic_job import Job, job

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
SCRIPT = Path(__file__).parent / "trainer_going_on.py"
WITHOUT_END = 10**6  # steps


def taken(here: Job, steps: range) -> list[int]:
    """Return the samples that all workers have taken in these steps."""
    lines = [line for one in here.workers for line in here.lines(one)]
    return [sample for step, _, _, _, *drawn in lines if step in steps for sample in drawn]


def end(here: Job, worker: subprocess.Popen[str]) -> int:
    """Make all workers end at a step with a checkpoint, which is more than a second away; return its number."""
    last = here.lines(worker)[-1][0] // 40 * 40 + 80
    (here.folder / "end.part").write_text(str(last))
    (here.folder / "end.part").rename(here.folder / "end")
    return int(last)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"sync": "updates", "density": 0.1},
        {"compression": "topk", "density": 0.1, "exchange": "sparse"},
    ],
    ids=["default", "updates", "topk"],
)  # fmt: skip
def test_trainers_go_on_where_one_dies_one_comes_and_one_leaves(tmp_path: Path, setting: dict[str, Any]) -> None:
    with job(tmp_path, {**setting, "elastic": {"suspect": 5.0}}, script=SCRIPT) as here:
        first, second, third = (here.start(steps=WITHOUT_END) for _ in range(3))
        here.wait_for(lambda: all(here.size(one) == 3 for one in (first, second, third)), 100)
        of_three = here.lines(third)[-1][0]
        here.wait_for_steps(5, third)
        first.kill()
        here.wait_for(lambda: here.size(third) == 2)
        fourth = here.start(steps=WITHOUT_END)
        here.wait_for(lambda: len(here.lines(fourth)) >= 4, 60)
        second.send_signal(signal.SIGTERM)
        assert second.wait(200) == 0, here.logs()
        left = here.lines(second)[-1][0] + 1
        assert f"agmerge: this worker leaves its job after step {left}, as told: the others go on" in here.log(second)
        assert f"\nleft {left} " in here.log(second) and "\nended" not in here.log(second)
        last = end(here, third)
        for worker in (third, fourth):
            assert worker.wait(200) == 0, here.logs()

        assert here.differing() == {}
        assert here.lines(third)[-1][0] == here.lines(fourth)[-1][0] == last - 1
        assert here.lines(fourth)[0][0] > of_three + 5 and here.lines(second)[-1][0] < last - 1
        samples = taken(here, range(of_three + 1, of_three + 4))
        assert len(samples) == 3 * 3 * 4 and len(set(samples)) >= 30, "within an epoch each is taken once"

        told = [here.log(one).count("'loss'") for one in here.workers]
        assert sum(told) == last // 20, f"rank 0 alone logs: {told}"
        trained = json.loads((tmp_path / "out" / f"checkpoint-{last}" / "trainer_state.json").read_text())
        steps = [one["step"] for one in trained["log_history"] if "loss" in one]
        assert steps == list(range(steps[0], last + 1, 20)), "whoever saves has what others have logged"
        assert (tmp_path / "last" / "model.safetensors").exists()


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_job_goes_on_from_a_checkpoint_of_the_trainer(tmp_path: Path) -> None:
    """All are killed; the new ones load what rank 0 has written, and its place in the data."""
    with job(tmp_path, {"elastic": {"min_workers": 2}}, script=SCRIPT) as here:
        dead = [here.start(steps=WITHOUT_END) for _ in range(2)]
        here.wait_for(lambda: all(len(here.lines(one)) > 45 for one in dead), 100)
        for one in dead:
            one.kill()
        found = json.loads((tmp_path / "out" / "checkpoint-40" / "agmerge_samples.json").read_text())
        place = {"epoch": 3, "taken": 32, "count": 96}  # 40 steps of 2 workers, each of 4 samples
        assert found == {**place, "batch_size": 4, "seed": 42, "shuffle": True}
        new = [here.start(steps=WITHOUT_END, resumes=True) for _ in range(2)]
        here.wait_for(lambda: all(here.lines(one) for one in new), 100)
        last = end(here, new[0])
        for one in new:
            assert one.wait(200) == 0, here.logs()
        assert here.lines(new[0])[0][0] % 40 == 0 and here.lines(new[0])[-1][0] == last - 1
        assert len({here.lines(one)[-1][2] for one in new}) == 1


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("setting", [{}, {"sync": "updates", "density": 0.1}], ids=["default", "updates"])
def test_accelerators_go_on_where_one_dies_and_one_comes(tmp_path: Path, setting: dict[str, Any]) -> None:
    with job(tmp_path, setting, script=SCRIPT.with_name("accelerate_going_on.py")) as here:
        first, second = (here.start(steps=WITHOUT_END) for _ in range(2))
        here.wait_for(lambda: all(here.size(one) == 2 for one in (first, second)), 100)
        here.wait_for_steps(5, second)
        first.kill()
        here.wait_for(lambda: here.size(second) == 1)
        third = here.start(steps=WITHOUT_END)
        here.wait_for(lambda: len(here.lines(third)) >= 4, 60)
        last = end(here, second)
        for worker in (second, third):
            assert worker.wait(200) == 0, here.logs()
        assert here.differing() == {}
        assert here.lines(second)[-1][0] == here.lines(third)[-1][0] == last
        if not setting:
            assert 0.0 < max(line[4] for line in here.lines(third)) <= 0.0101, "clipped after all is combined"


@pytest.mark.long
@pytest.mark.timeout(400)
def test_what_cannot_be_elastic_is_refused_by_name(tmp_path: Path) -> None:
    """Trainers that count on a fixed number of workers, and data that cannot be dealt out."""
    with job(tmp_path, {}, script=SCRIPT.with_name("trainer_refused.py")) as here:
        worker = here.start()
        assert worker.wait(200) == 0, here.logs()
