# SPDX-License-Identifier: Apache-2.0
"""Runs of ``examples/train.py`` that go on from a checkpoint, among ranks in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import train
from support.example_trainings import locked, log, outcome, results  # noqa: F401
from training import options as train_options
from training.checkpoints import Checkpoints
from training.stopping import Stopping

from agmerge.testing import run


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "digits --compression topk --clip 1",
        "digits --compression dgc",
        "digits --compression none --batches-per-allreduce 2",
        "digits --compression acpsgd --amp bf16",
        "gpt-stdlib --tiny",
        "gpt-stdlib --tiny --local-steps 3",
        "gpt-stdlib --tiny --sync gradients --compression topk",
    ],
)
def test_a_run_goes_on_to_the_bit(line: str, tmp_path: Path) -> None:
    straight = results(f"{line} --max-steps 10", tmp_path)
    kept = f"--checkpoint-dir {tmp_path / 'kept'}"
    results(f"{line} --max-steps 4 {kept}", tmp_path / "halves")
    resumed = results(f"{line} --max-steps 10 {kept} --resume", tmp_path / "halves")
    assert [outcome(found) for found in resumed] == [outcome(found) for found in straight]
    kinds = [entry["kind"] for entry in log(tmp_path / "halves")]
    assert kinds == ["start", "plan", "epoch", "end"] * 2
    assert [entry["step"] for entry in log(tmp_path / "halves") if entry["kind"] == "start"] == [0, 4]


def in_turn(folder: Path, work: Any) -> list[str]:
    """Return the error that each of two workers gets from ``work(checkpoints)``."""

    def body(rank: int) -> str:
        with pytest.raises((OSError, ValueError)) as raised:
            work(Checkpoints(folder))
        return f"{type(raised.value).__name__}: {raised.value}"

    return run(2, body)


def test_a_worker_that_cannot_write_or_read_ends_all_of_them_alike(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / ".1.pt.unfinished").symlink_to("/dev/full")
    first, second = in_turn(tmp_path, lambda checkpoints: checkpoints.save(7, {"workers": 2}, None))
    assert first == second and first.startswith(f"OSError: worker 1 could not save step 7 in {tmp_path}: ")
    assert [path.name for path in (tmp_path / "7").iterdir()] == ["0.pt"]
    (tmp_path / "7" / "1.pt").write_bytes(b"nonsense")
    first, second = in_turn(tmp_path, lambda checkpoints: checkpoints.newest())
    assert first == second and first.startswith(f"ValueError: worker 1 cannot read a checkpoint in {tmp_path}: ")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("before, after", [(2, 1), (2, 3), pytest.param(1, 2, marks=pytest.mark.long)])
def test_other_numbers_of_workers_go_on_from_a_portable_checkpoint(before: int, after: int, tmp_path: Path) -> None:
    line = f"digits --compression topk --checkpoint-dir {tmp_path / 'kept'}"
    first = results(f"{line} --portable --epochs 8 --max-steps 100", tmp_path, before)[0]
    again = results(f"{line} --resume --epochs 8", tmp_path, after)[0]
    assert again["replicas_equal"] and again["epoch"] == 8 and again["accuracy"] > 0.85
    assert again["bytes_sent"] > first["bytes_sent"]  # totals go on
    steps = {workers: 1437 // (16 * workers) for workers in (before, after)}
    expected = first["epoch"] * steps[before] + (100 - first["epoch"] * steps[before])
    assert expected == 100
    done = (100 - first["epoch"] * steps[before]) * before // after
    assert again["step"] == 100 + steps[after] - min(done, steps[after]) + (8 - first["epoch"] - 1) * steps[after]


def test_a_checkpoint_of_another_number_of_workers_is_an_error_that_says_so(tmp_path: Path) -> None:
    line = f"digits --compression topk --checkpoint-dir {tmp_path / 'kept'} --max-steps 2"
    results(line, tmp_path)
    with pytest.raises(Exception, match="step 2 of 2 workers, and here are 1: save with --portable"):
        results(f"{line} --resume", tmp_path, workers=1)


def test_two_checkpoints_are_kept_and_one_that_was_not_finished_is_not_taken(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    line = f"digits --compression none --batch-size 512 --checkpoint-dir {kept}"  # two steps an epoch
    results(f"{line} --epochs 3", tmp_path, workers=1)
    assert sorted(path.name for path in kept.iterdir()) == ["4", "6"]
    (kept / "9").mkdir()
    (kept / "9" / ".0.pt.unfinished").write_bytes(b"half")
    found = results(f"{line} --epochs 4 --resume", tmp_path, workers=1)
    assert found[0]["step"] == 8


def test_a_signal_to_one_worker_ends_all_after_the_same_step(tmp_path: Path) -> None:
    args = train_options.arguments(
        f"digits --compression topk --checkpoint-dir {tmp_path / 'kept'} --log-dir {tmp_path}".split()
    )

    def body(rank: int) -> dict[str, Any]:
        stopping = Stopping()
        if rank == 1:
            stopping.note(15, None)
        return train.train(args, stopping)

    found = run(2, body)
    assert [one["reason"] for one in found] == ["signal"] * 2 and found[0]["step"] == found[1]["step"] < 44
    assert sorted(path.name for path in (tmp_path / "kept").glob("*/*")) == ["0.pt", "1.pt"]
