# SPDX-License-Identifier: Apache-2.0
"""``agmerge compare``: compressors found in files, the arithmetic of its table, a run that is cut off, and refusals."""

from __future__ import annotations

import csv
import math
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from agmerge.cli import compare, compare_tasks
from agmerge.cli.compare import DENSE, MINE, Job, Refused, compressor_in, module_of, rows_of
from agmerge.cli.compare_tasks import POINTS, Outcome, Task, rate_at, steps_to, train

CLASS = """
class {name}:
    def compress(self, tensor, name):
        return [tensor], None

    def decompress(self, tensors, ctx):
        return tensors[0]
"""
MEMORY = """
class Kept:
    def compensate(self, tensor, name):
        return tensor

    def update(self, tensor, name, compressor, tensors, ctx):
        pass
"""


def file_of(folder: Path, *parts: str) -> Path:
    path = folder / "mine.py"
    path.write_text("\n".join(parts), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "parts, wanted, found",
    [
        ([CLASS.format(name="One")], None, "One(memory='none', sums=False)"),
        ([CLASS.format(name="One"), MEMORY], None, "One(memory='Kept', sums=False)"),
        ([CLASS.format(name="One"), CLASS.format(name="Two")], "Two", "Two(memory='none', sums=False)"),
        ([CLASS.format(name="One"), CLASS.format(name="Two"), "compression = Two()"], None, "Two(memory="),
        (["import sparsifiers", "compression = sparsifiers.get('topk', density=0.5)"], None, "topk("),
        (["import sparsifiers", "class Own(sparsifiers.Sparsifier):", "    name = 'own'"], None, "own("),
    ],
)
def test_a_compressor_is_found(parts: list[str], wanted: str | None, found: str, tmp_path: Path) -> None:
    if "class Own" in " ".join(parts):
        parts = [*parts, "    def _select(self, vector, request):", "        raise NotImplementedError"]
    assert repr(compressor_in(module_of(file_of(tmp_path, *parts)), wanted)).startswith(found)


@pytest.mark.parametrize(
    "parts, wanted, text",
    [
        ([""], None, r"no class with compress\(\) and decompress\(\)"),
        ([CLASS.format(name="One"), CLASS.format(name="Two")], None, r"found 2 compressors \(One, Two\)"),
        ([CLASS.format(name="One")], "Three", "there is no 'Three'"),
        (["1 / 0"], None, "ZeroDivisionError"),
        ([CLASS.format(name="One"), "    def __init__(self, ratio): pass"], None, r"Set compression = One\(...\)"),
        (["compression = 3"], None, r"has no compress\(tensor, name\)"),
    ],
)
def test_what_is_not_clear_is_refused(parts: list[str], wanted: str | None, text: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=text):
        compressor_in(module_of(file_of(tmp_path, *parts)), wanted)


def test_a_file_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    numbers: tuple[Any, ...] = (1, 2, 1.0, "200mbit", str(tmp_path))
    assert compare.main(str(tmp_path / "no.py"), ["topk"], ["digits"], *numbers) == 1
    mine = str(file_of(tmp_path, CLASS.format(name="One")))
    assert compare.main(mine, ["topkk"], ["digits"], *numbers) == 1
    assert compare.main(mine, ["topk"], ["mnist"], *numbers) == 1
    assert compare.main(mine, ["topk"], ["digits"], 1, 5, 1.0, "200mbit", str(tmp_path)) == 1
    told = capsys.readouterr().err
    for text in ("there is no such Python file", "'topkk' is unknown", "'mnist' is unknown", "that divides 32"):
        assert text in told


def test_a_loss_between_two_evaluations_is_reached_on_a_straight_line() -> None:
    losses = [4.0, 3.0, 1.0, *[1.0] * (POINTS - 3)]
    assert steps_to(losses, 2.0, 120) == 25.0
    assert steps_to(losses, 4.0, 120) == 10.0
    assert steps_to(losses, 0.5, 120) is None
    assert [rate_at(step, 100) for step in (0, 9, 10)] == [0.1, 1.0, 1.0] and math.isclose(
        rate_at(99, 100), 0, abs_tol=1e-3
    )


def outcome(last: float, size: float = 1e6, seconds: float = 0.01) -> Outcome:
    return Outcome([3.0] * (POINTS - 1) + [last], size, seconds)


def test_the_table_says_what_trainings_say() -> None:
    def job(contender: str, seed: int) -> Job:
        return Job("digits", contender, seed, 2, 120, "")

    found = {job(DENSE, seed): outcome(1.0 + seed) for seed in range(3)}
    found |= {job(MINE, seed): outcome(1.01 * (1.0 + seed), 1e5, 0.012) for seed in range(3)}
    found |= {job("topk", 3): outcome(1.0)}  # without a partner
    dense, mine = rows_of(found, rate=1e7)
    assert (dense.excess.mean, dense.time, dense.codec) == (0.0, pytest.approx(1.0), 0.0)
    assert mine.excess.mean == pytest.approx(1.0) and mine.excess.half == pytest.approx(0.0, abs=1e-9)
    assert (mine.seeds, mine.megabytes, mine.codec) == (3, pytest.approx(0.1), pytest.approx(2.0))
    # Each reaches its target in the last twelfth of a training; a step takes 12 + 10 ms, dense 10 + 100 ms.
    assert mine.time == pytest.approx(22 / 110, rel=0.01)


def small() -> Task:
    rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    data = (rows, rows.sum(1).gt(0).long())
    return Task(
        lambda: nn.Linear(8, 2), lambda: (data, data), lambda model: torch.optim.SGD(model.parameters(), 0.1), 8, 24
    )


class Inline:
    """Executor that runs at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.jobs = 0

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, function: Any, *arguments: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function(*arguments))
        return done

    def shutdown(self, cancel_futures: bool) -> None:
        pass


def test_a_run_prints_its_table_and_continues_where_it_was_cut_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trained = []

    def counted(task: Task, options: Any, workers: int, seed: int, steps: int) -> Outcome:
        trained.append(options["compression"])
        return train(task, options, workers, seed, steps)

    monkeypatch.setattr(compare, "TASKS", {"small": small()})
    monkeypatch.setattr(compare, "ProcessPoolExecutor", Inline)
    monkeypatch.setattr(compare, "train", counted)
    mine = str(file_of(tmp_path, CLASS.format(name="One")))
    numbers: tuple[Any, ...] = (2, 2, 1.0, "200mbit", str(tmp_path / "out"))
    assert compare.main(mine, ["topk"], ["small"], *numbers) == 0
    assert len(trained) == 6
    assert compare.main(mine, ["topk", "eden-2"], ["small"], *numbers) == 0
    assert trained[6:] == ["eden-2"] * 2
    lines = (tmp_path / "out" / "compare.md").read_text().splitlines()
    assert [line.split(" | ")[1] for line in lines[2:6]] == [DENSE, MINE, "topk", "eden-2"]
    with (tmp_path / "out" / "compare.csv").open() as file:
        table = list(csv.DictReader(file))
    # The class sends what it is given: the same sums as dense training's.
    assert [float(row["excess, %"].split(" ")[0]) for row in table[:2]] == [0.0, 0.0]
    assert "6 of 6" in capsys.readouterr().out


def test_trainings_with_one_seed_are_equal() -> None:
    first, second = (train(small(), {"compression": "none"}, 2, 5, 24) for _ in range(2))
    other = train(small(), {"compression": "none"}, 2, 6, 24)
    assert first.losses == second.losses != other.losses and len(first.losses) == POINTS
    assert set(compare_tasks.TASKS) == {"digits", "gpt-small", "resnet-digits"}


def test_a_training_that_diverges_is_told_and_the_others_go_on() -> None:
    jobs = [compare.Job("digits", name, 0, 2, 300, "") for name in (compare.DENSE, compare.MINE)]
    losses = [[1.0] * compare_tasks.POINTS, [2.0] + [math.inf] * (compare_tasks.POINTS - 1)]
    found = {job: compare_tasks.Outcome(each, 1e3, 1e-3) for job, each in zip(jobs, losses, strict=True)}
    rows = compare.rows_of(found, 25e6)
    assert compare.cells(rows[1])[4] == "diverged" and compare.cells(rows[1])[5] == "-"
    assert compare.MINE not in compare.picture(rows)


def test_gradients_that_are_not_finite_end_a_training() -> None:
    task = replace(compare_tasks.TASKS["digits"], optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e30))
    outcome = compare_tasks.train(task, {"compression": "none"}, 2, 0, 40)
    assert len(outcome.losses) == compare_tasks.POINTS and outcome.losses[-1] == math.inf
    assert outcome.bytes_per_step > 0


@pytest.mark.parametrize("name", compare_tasks.TASKS)
def test_uncompressed_training_converges(name: str) -> None:
    task = compare_tasks.TASKS[name]
    losses = compare_tasks.train(task, {"compression": "none"}, 2, 0, task.steps // 2).losses
    assert math.isfinite(losses[-1]) and losses[-1] < 0.9 * losses[0]


def test_low_rank_compressors_always_compress(tmp_path: Path) -> None:
    assert compare.options_of("powersgd", tmp_path, None)["exchange"] == "sparse"
    assert "exchange" not in compare.options_of("eden-2", tmp_path, None)
