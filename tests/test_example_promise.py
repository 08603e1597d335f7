# SPDX-License-Identifier: Apache-2.0
"""What ``make train`` shows: three trainings beside each other."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import promise
import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_the_table_compares_with_dense() -> None:
    figures = {"seconds": 20.0, "MB": 300.0, "loss": 2.5, "accuracy": 0.25}
    chosen = argparse.Namespace(steps=60, workers=2, link="200mbit")
    lines = promise.table([("dense", figures), ("the default", {**figures, "seconds": 5.0})], chosen).splitlines()
    assert "60 steps" in lines[0] and "200mbit (pretended)" in lines[0]
    assert lines[2].split() == ["dense", "20.0", "1.0", "300.0", "2.500", "25.0%"]
    assert lines[3].split() == ["the", "default", "5.0", "4.0", "300.0", "2.500", "25.0%"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_it_runs_as_make_train_runs_it() -> None:
    command = [sys.executable, str(ROOT / "examples" / "promise.py"), "--steps", "3", "--link", "10gbit"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    names = [line.split("  ")[0] for line in done.stdout.splitlines()[-3:]]
    assert names == ["dense", "the default", "dgc"]


def test_a_training_that_fails_shows_why() -> None:
    with pytest.raises(SystemExit, match="compression='none' has failed"):
        promise.run("none", argparse.Namespace(workers=0, link="200mbit", steps=1))
