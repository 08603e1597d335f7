# SPDX-License-Identifier: Apache-2.0
"""G7, G9, G13 together: a thousand steps or more of everything that a training survives, against the same in memory."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from launching import HERE, results, torchrun
from soak import EVERY, RANKS, soak
from support import Parts, agreed, seeded

from agmerge import testing

SILENT = pytest.mark.filterwarnings("ignore:AGM112")
MOST = 20 << 20  # bytes that a process may grow by, once a quarter is done


def launched(folder: Path, steps: int, timeout: float) -> list[dict[str, Any]]:
    """What every real worker saw."""
    ended = torchrun(RANKS, HERE / "soak.py", str(folder), str(steps), timeout=timeout)
    assert ended.code == 0, ended.output[-4000:]
    return results(folder, RANKS)["soak"]


def in_memory(steps: int) -> list[list[dict[str, Any]]]:
    """What every rank of an in-memory group sees."""
    model = seeded(Parts)
    copies = [copy.deepcopy(model) for _ in range(RANKS)]
    return testing.run(RANKS, lambda rank: list(soak(rank, copies[rank], steps)))


def survives(folder: Path, steps: int, timeout: float) -> None:
    """Real workers see what the in-memory group does, and hold no more at the end than after a quarter."""
    with ThreadPoolExecutor(1) as beside:
        launch = beside.submit(launched, folder, steps, timeout)
        expected, real = in_memory(steps), launch.result()
    for rank in range(RANKS):
        for look, (found, wanted) in enumerate(zip(real[rank]["seen"], expected[rank], strict=True)):
            assert found == wanted, f"rank {rank}, step {EVERY * (look + 1)}"
    for found in zip(*(one["seen"] for one in real), strict=True):
        for what in ("parameters", "momenta", "plan"):
            agreed([one[what] for one in found])
        assert all(one["finite"] for one in found)
    assert sum(one["waiting"] > 0 for one in real[0]["seen"]) > len(real[0]["seen"]) / 2  # there is something to lose
    assert len({one["plan"] for one in real[0]["seen"]}) > 5
    for one in real:
        quarter, *later = one["held"][len(one["held"]) // 4 :]
        assert max(held["bytes"] for held in later) < quarter["bytes"] + MOST, one["held"]
        for what in ("threads", "files"):
            assert max(held[what] for held in later) <= quarter[what], (what, one["held"])


@pytest.mark.long
@pytest.mark.timeout(400)
@SILENT
def test_a_thousand_steps_of_everything(tmp_path: Path) -> None:
    survives(tmp_path, 1000, timeout=300)


@pytest.mark.long
@pytest.mark.timeout(3000)
@SILENT
def test_twenty_thousand_steps_of_everything(tmp_path: Path) -> None:
    survives(tmp_path, 20000, timeout=2400)
