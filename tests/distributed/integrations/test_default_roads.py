# SPDX-License-Identifier: Apache-2.0
"""One rule on every road: what a script gets that names no compressor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launching import results, torchrun

SCRIPT = Path(__file__).with_name("default_roads.py")
ROW = ["none", "int8", "eden-4", "eden-2"]  # of AdamW
NEEDS = {"trainer": ("transformers", "accelerate"), "accelerate": ("accelerate",), "lightning": ("lightning",)}
OF_FRAMEWORKS = [pytest.param(road, marks=pytest.mark.long) for road in NEEDS]  # their imports take most of the time

pytestmark = pytest.mark.timeout(400)


def launched(folder: Path, workers: int, *scenarios: str) -> dict[str, list[Any]]:
    ended = torchrun(workers, SCRIPT, str(folder), *scenarios, timeout=300)
    assert ended.code == 0, ended.output[-6000:]
    return results(folder, workers)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What both ranks found with our own classes."""
    return launched(tmp_path_factory.mktemp("roads"), 2, "hook", "wrapper")


def check(ranks: list[Any], row: list[str], first: str) -> None:
    """See that ranks have the same choice and bits, and that nothing is kept beside parameters."""
    assert all(one == ranks[0] for one in ranks)
    assert ranks[0]["candidates"] == row and ranks[0]["until chosen"] == first and ranks[0]["kept"] == 0
    assert ranks[0]["quantiser"] == first and ranks[0]["wire"] == sorted([first, "header", "plain"])


@pytest.mark.parametrize("road", ["wrapper", *OF_FRAMEWORKS])
def test_the_default_is_the_same_choice_and_nothing_is_said(
    road: str, found: dict[str, list[Any]], tmp_path: Path
) -> None:
    for module in NEEDS.get(road, ()):
        pytest.importorskip(module)
    ranks = (found if road in found else launched(tmp_path, 2, road))[road]
    check([rank["found"] for rank in ranks], ROW, "eden-4")
    assert [text for rank in ranks for text in rank["warnings"]] == []


def test_ddp_has_it_too_with_the_wrappers_bits_and_dense_or_8_bits_without_an_optimizer(
    found: dict[str, list[Any]],
) -> None:
    ranks = [rank["found"] for rank in found["hook"]]
    check([rank["with"] for rank in ranks], ROW, "eden-4")
    check([rank["without"] for rank in ranks], ROW[:2], "int8")
    assert ranks[0]["with"]["bits"] == found["wrapper"][0]["found"]["bits"]


def test_without_an_optimizer_rank_0_says_in_one_line_what_allows_fewer_bits(found: dict[str, list[Any]]) -> None:
    first, second = (rank["found"]["said"] for rank in found["hook"])
    ((text, file),) = first["without"]
    assert "optimizer=" in text and "8 bits" in text and file == SCRIPT.name
    assert first["with"] == second["with"] == second["without"] == []


@pytest.mark.long
def test_replicas_of_shards_exchange_them_by_the_same_rule(tmp_path: Path) -> None:
    for rank in launched(tmp_path, 4, "mesh")["mesh"]:
        default, sparse = rank["found"]["default"], rank["found"]["sparse"]
        assert default["candidates"] == ROW[:3] and default["quantiser"] == "eden-4"
        assert sparse["candidates"] == [] and sparse["quantiser"] == "eden-4"  # of SGD
        assert all(one["replicas"] == 1 and one["moved"] for one in (default, sparse))
