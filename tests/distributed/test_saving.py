# SPDX-License-Identifier: Apache-2.0
"""Checkpoints between launches: one saves, another one loads; with as many workers to the bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from launching import HERE, results, torchrun

pytestmark = pytest.mark.timeout(400)


def launched(folder: Path, what: str, workers: int, saved_by: int, cells: Sequence[str] = ()) -> list[dict[str, Any]]:
    """What every rank saw, by cell."""
    ended = torchrun(workers, HERE / "saving.py", what, str(folder), str(saved_by), *cells, timeout=300)
    assert ended.code == 0, ended.output[-4000:]
    return results(folder, max(workers, saved_by))[f"{what}{workers}"][:workers]


def close(found: dict[str, float], expected: dict[str, float]) -> bool:
    return all(math.isclose(found[key], expected[key], rel_tol=1e-5, abs_tol=1e-6) for key in expected)


FEW = ("topk, sgd", "none, sgd", "dgc", "oktopk", "powersgd", "updates", "several")


@pytest.mark.parametrize("cells", [FEW, pytest.param((), marks=pytest.mark.long)], ids=["few", "all"])
def test_a_second_launch_goes_on_as_the_first_one_to_the_bit(tmp_path: Path, cells: tuple[str, ...]) -> None:
    saved = launched(tmp_path, "save", 2, 2, cells)
    loaded = launched(tmp_path, "load", 2, 2, cells)
    for cell, one in saved[0].items():
        assert len(set(one["seen"])) == 4 and any(one["waiting"].values()) == (cell not in _KEEPS_NOTHING), cell
        for seen in [saved[1][cell], *(rank[cell][way] for rank in loaded for way in ("by rank", "together", "dcp"))]:
            assert seen == one, cell


_KEEPS_NOTHING = ("none, sgd", "no memory", "ordered")


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(4, 2), (2, 4)], ids=["4 to 2", "2 to 4"])
def test_another_number_of_workers_takes_over_what_was_waiting(tmp_path: Path, sizes: tuple[int, int]) -> None:
    saved = launched(tmp_path, "save", sizes[0], sizes[0])
    loaded = launched(tmp_path, "load", sizes[1], sizes[0])
    for cell, one in saved[0].items():
        for way in ("together", "dcp"):
            assert all(rank[cell][way] == loaded[0][cell][way] for rank in loaded), cell
            assert close(loaded[0][cell][way]["waiting"], one["waiting"]), (cell, way)
            assert len(set(loaded[0][cell][way]["seen"])) == 4
        assert loaded[0][cell]["together"] == loaded[0][cell]["dcp"], cell
