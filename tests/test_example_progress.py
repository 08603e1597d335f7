# SPDX-License-Identifier: Apache-2.0
"""Bars and curves of the examples: where a person sees them or asks for them, of the first worker alone."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import mnist
import pytest
import torch
from support.tensorboard_curves import scalars
from training import options as train_options
from training import published
from training.progress import Curves, bar, say

from agmerge.testing import run

ROOT = Path(__file__).resolve().parents[1]


class Terminal(io.StringIO):
    """A text that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("terminal", "first", "seen"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_a_bar_is_shown_to_a_terminal_by_the_first_worker(
    terminal: bool, first: bool, seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    batches = torch.arange(6).view(3, 2)
    assert [batch.tolist() for batch in bar("epoch 1/2", batches, first=first)] == batches.tolist()
    assert ("epoch 1/2" in shown.getvalue() and "3" in shown.getvalue()) is seen
    assert bool(shown.getvalue()) is seen


def test_a_line_and_a_bar_make_way_for_each_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    for _ in bar("epoch 1/1", range(2)):
        say("a line")
    assert capsys.readouterr().out == "a line\n" * 2
    assert shown.getvalue().endswith("\r")  # the bar has gone


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("asked", [True, False])
def test_curves_are_written_by_the_first_worker_where_they_are_asked_for(
    first: bool, asked: bool, tmp_path: Path
) -> None:
    curves = Curves(tmp_path / "log" if asked else None, first)
    curves.add(1, {"train/loss": torch.tensor(0.5, requires_grad=True)})
    curves.add(2, {"train/loss": 0.25, "val/accuracy": 1.0})
    curves.close()
    expected = {"train/loss": [(1, 0.5), (2, 0.25)], "val/accuracy": [(2, 1.0)]}
    assert scalars(tmp_path) == (expected if first and asked else {})
    assert (tmp_path / "log").exists() is (first and asked)


def test_nobody_needs_tensorboard_who_asks_for_no_curves() -> None:
    code = "import sys; from training.progress import Curves; Curves(None).add(1, {'a': 1.0}); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "examples", capture_output=True, text=True, timeout=100, check=True
    )
    assert not any(name.startswith("tensorboard") for name in done.stdout.split())


@pytest.mark.slow
def test_mnist_draws_its_loss_and_its_accuracy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    line = "mnist.py --no-cuda --epochs 2 --batch-size 512 --compression none"
    for more, expected in ((["--log-dir", "log"], True), ([], False)):
        monkeypatch.setattr(sys, "argv", [*line.split(), *more])
        mnist.main()
        found = scalars(tmp_path)
        assert bool(found) is expected
        if found:
            assert [step for step, _ in found["train/loss"]] == [1, 2, 3, 4, 5, 6]
            assert [step for step, _ in found["val/accuracy"]] == [3, 6] and set(found) == {
                "train/loss",
                "val/loss",
                "val/accuracy",
            }
        out, err = capsys.readouterr()
        assert "Train Epoch: 2 [0/1437 (0%)]" in out and not err
        for path in (tmp_path / "log").glob("*"):
            path.unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


# -- numbers of workers, which published lines say -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ("--nworkers 2 --nwpernode 2", ""),
        ("--nworkers 2 --nwpernode 4", ""),  # there is room for more
        ("", ""),
        ("--nworkers 4 --nwpernode 4", "--nworkers 4, and the launcher has started 2: the two must be equal"),
        ("--nworkers 2 --nwpernode 1", "--nwpernode 1, and the launcher has started 2 of 2 workers on one machine"),
    ],
)
def test_numbers_of_workers_are_compared_with_the_launchers(flags: str, error: str) -> None:
    args = train_options.arguments(["digits", *flags.split()])

    def worker(rank: int) -> str:
        try:
            published.check_workers(args)
        except ValueError as found:
            return str(found)
        return ""

    assert run(2, worker) == [error, error]
