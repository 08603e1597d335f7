# SPDX-License-Identifier: Apache-2.0
"""Scripts that train with ``sync="updates"`` by one line, and end: ranks have the same model, or it is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launching import torchrun

SCRIPT = Path(__file__).parent / "ended_updates.py"
WARNED = "AGM118: "
pytestmark = pytest.mark.timeout(400)


def launched(folder: Path, road: str, end: str) -> tuple[list[dict[str, Any]], int]:
    """What both ranks saw, and how often the warning was printed."""
    ended = torchrun(2, SCRIPT, str(folder), road, end, timeout=300)
    assert ended.code == 0, ended.output[-6000:]
    assert "weakref.py" not in ended.output  # no line of the script has deleted the optimizer
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)], ended.output.count(WARNED)


@pytest.mark.parametrize(
    "road", ["ddp", *(pytest.param(one, marks=pytest.mark.long) for one in ("accelerate", "wrapper"))]
)
def test_close_or_the_end_of_training_makes_parameters_equal(road: str, tmp_path: Path) -> None:
    (one, other), warnings = launched(tmp_path, road, "close")
    assert one["last"] == other["last"] and warnings == 0
    if road == "wrapper":
        return
    one, other = one["looked"], other["looked"]
    for same in ("evaluated", "saved", "saved by name"):
        assert one[same] == other[same], same
    assert one["saved"] == one["saved by name"] and one["own"] != other["own"]
    assert one["own"] == one["own behind evaluation"] and one["trained"] != one["evaluated"]


@pytest.mark.long
@pytest.mark.parametrize(
    "road, end, says",
    [
        ("ddp", "silent", 1),
        pytest.param("wrapper", "silent", 1, marks=pytest.mark.long),
        pytest.param("ddp", "error", 1, marks=pytest.mark.long),
    ],
)
def test_else_one_warning_says_so(road: str, end: str, says: int, tmp_path: Path) -> None:
    (one, other), warnings = launched(tmp_path, road, end)
    assert one["last"] != other["last"] and warnings == says


@pytest.mark.long
@pytest.mark.parametrize("end", ["consolidate", "shared"])
def test_who_has_asked_for_the_shared_parameters_is_told_nothing(end: str, tmp_path: Path) -> None:
    (one, other), warnings = launched(tmp_path, "wrapper", end)
    assert (one["last"] == other["last"]) is (end == "consolidate") and warnings == 0
    assert one.get("shared") == other.get("shared")
