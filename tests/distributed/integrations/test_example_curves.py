# SPDX-License-Identifier: Apache-2.0
"""Curves and bars of the examples on two real workers: the first alone draws, and a log file sees no bar."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import ROOT, torchrun
from support.tensorboard_curves import scalars

pytestmark = pytest.mark.timeout(400)

LONG = pytest.mark.long


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "flags", "tags"),
    [
        ("ddp_digits.py", "--epochs 1", ("train/loss", "val/accuracy")),
        pytest.param("fsdp2_digits.py", "--epochs 1 --shard 1", ("train/loss", "val/accuracy"), marks=LONG),
        pytest.param("mnist.py", "--epochs 1 --no-cuda", ("train/loss", "val/accuracy", "val/loss"), marks=LONG),
        pytest.param("transformers_digits.py", "--epochs 1 --out {}/out", ("train/loss", "eval/accuracy"), marks=LONG),
    ],
)
def test_the_first_worker_alone_draws(script: str, flags: str, tags: tuple[str, ...], tmp_path: Path) -> None:
    if script.startswith("transformers"):
        pytest.importorskip("transformers")
    line = f"{flags.format(tmp_path)} --log-dir {tmp_path / 'log'}".split()
    ended = torchrun(2, ROOT / "examples" / script, *line, timeout=300)
    assert ended.code == 0, ended.output[-3000:]
    assert "step/s" not in ended.output and "it/s" not in ended.output
    found = scalars(tmp_path / "log")
    assert set(tags) <= set(found)
    steps = [step for step, _ in found["train/loss"]]
    assert steps == sorted(set(steps))  # each once: two writers would repeat them
