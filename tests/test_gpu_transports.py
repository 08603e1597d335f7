# SPDX-License-Identifier: Apache-2.0
"""The comparison of Horovod's transport with torch's: what fails it, and that it runs, over Gloo."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from device import transports
from device.transports import DDP, DENSE, MISSION, Found, compared

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, str(ROOT / "benchmarks" / "gpu_world.py"), "--backend", "horovod"]


def found() -> Found:
    one = {"seen": ["a", "b"], "bytes": 1000, "ms": 2.0, "equal": True}
    return {name: copy.deepcopy(one) for name in (DENSE, *MISSION, DDP)}


@pytest.mark.parametrize(
    "change, is_right",
    [
        (lambda one: None, True),
        (lambda one: one.update(ms=90.0), True),  # seconds are only told
        (lambda one: one.update(bytes=1010), True),
        (lambda one: one.update(bytes=1011), False),
        (lambda one: one.update(seen=["a", "c"]), False),
        (lambda one: one.update(equal=False), False),
    ],
)
def test_replicas_bits_and_bytes_are_judged(change: Callable[[object], None], is_right: bool) -> None:
    ours, lines = found(), list[str]()
    change(ours["sidco"])
    assert compared(ours, found(), lines.append) is is_right
    assert [line for line in lines if "FAILED" in line] == [line for line in lines if "sidco" in line and not is_right]
    assert len(lines) == 1 + len(MISSION) + 1


def test_without_horovod_it_says_how_to_build_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transports.shutil, "which", lambda *_, **__: None)
    assert transports.main(2, False) == 2
    assert "python -m agmerge build-horovod --nccl" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.timeout(300)
def test_it_runs_over_gloo() -> None:
    pytest.importorskip("horovod")
    done = subprocess.run([*COMMAND, "--cpu"], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0 and done.stdout.count("the same") == 6, done.stdout + done.stderr
