# SPDX-License-Identifier: Apache-2.0
"""The file that a stranger with GPUs mails back, and what is said where there are none."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gpu_report
import pytest
import torch


def test_without_a_gpu_the_report_says_what_it_would_have_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_report.main(["--out", str(tmp_path / "gpu.json")]) == 0
    out = capsys.readouterr().out
    assert "There is no GPU here" in out and "gpu.py --world" in out and not list(tmp_path.iterdir())


@pytest.mark.parametrize("gpus, workers", [(1, 2), (4, 4)])
def test_the_report_runs_a_worker_a_gpu_and_two_at_least(gpus: int, workers: int) -> None:
    todo = gpu_report.commands(gpus)
    assert list(todo) == ["one", "world"] and f"--nproc_per_node={workers}" in todo["world"]
    assert all(Path(gpu_report.JUDGE).name in " ".join(one) for one in todo.values())


def test_the_report_keeps_figures_and_lines_and_fails_with_one_of_them(tmp_path: Path) -> None:
    good = "import json, sys; print('ok 1'); open(sys.argv[2], 'w').write(json.dumps({'figures': [1], 'about': {}}))"
    todo = {
        "one": [sys.executable, "-c", good],
        "world": [sys.executable, "-c", "print('broken'); raise SystemExit(3)"],
    }
    out = tmp_path / "gpu.json"
    assert gpu_report.report({"one": todo["one"]}, out) == 0 and gpu_report.report(todo, out) == 1
    found = json.loads(out.read_text())
    assert found["one"] == {"figures": [1], "about": {}, "lines": ["ok 1"], "exit_code": 0}
    assert found["world"] == {"lines": ["broken"], "exit_code": 3}
