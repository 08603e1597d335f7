# SPDX-License-Identifier: Apache-2.0
"""What ``make train`` shows: three trainings, labeled by the arguments that make them."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import promise
import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_the_table_compares_with_no_compression() -> None:
    figures = {"seconds": 20.0, "MB": 300.0, "loss": 2.5, "accuracy": 0.25}
    chosen = argparse.Namespace(steps=60, workers=2, link="200mbit")
    names = [promise.label(options) for options in ({"compression": "none"}, {}, {"sync": "updates"})]
    rows = [(name, {**figures, "seconds": 20.0 / (1 + number)}) for number, name in enumerate(names)]
    lines = promise.table(rows, chosen).splitlines()
    assert "60 steps" in lines[0] and "simulated network: 200mbit" in lines[0]
    assert lines[1].split()[:2] == ["seconds", "speedup"]
    assert lines[2].split() == ['compression="none"', "20.0", "1.0", "300.0", "2.500", "25.0%"]
    assert lines[3].split() == ["default", "10.0", "2.0", "300.0", "2.500", "25.0%"]
    assert lines[4].split()[:3] == ['sync="updates"', "6.7", "3.0"]
    assert "chance" in lines[5]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("flags", "third"), [([], 'sync="updates"'), (["--compression", "dgc"], 'compression="dgc"')])
def test_it_runs_as_make_train_runs_it(flags: list[str], third: str) -> None:
    command = [sys.executable, str(ROOT / "examples" / "promise.py"), "--steps", "3", "--link", "10gbit", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line.split()[0] for line in done.stdout.splitlines()[-4:-1]] == ['compression="none"', "default", third]


@pytest.mark.long
def test_a_training_that_fails_shows_why() -> None:
    with pytest.raises(SystemExit, match='compression="none" failed'):
        promise.run({"compression": "none"}, argparse.Namespace(workers=0, link="200mbit", steps=1))
