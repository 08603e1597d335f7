# SPDX-License-Identifier: Apache-2.0
"""One rule on every road: what a script gets that names no compressor."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from launching import results, torchrun

SCRIPT = Path(__file__).with_name("default_roads.py")
ROW = ["none", "int8", "eden-4", "eden-2"]  # of AdamW
NEEDS = {"trainer": ("transformers", "accelerate"), "accelerate": ("accelerate",), "lightning": ("lightning",)}
ROADS = ("wrapper", "trainer", "accelerate", "lightning")

pytestmark = pytest.mark.timeout(300)


def launched(folder: Path, workers: int, *scenarios: str) -> dict[str, list[Any]]:
    ended = torchrun(workers, SCRIPT, str(folder), *scenarios, timeout=240)
    assert ended.code == 0, ended.output[-6000:]
    return results(folder, workers)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What both ranks found on every road that can be taken here."""
    there = [road for road in ("hook", *ROADS) if all(map(importlib.util.find_spec, NEEDS.get(road, ())))]
    return launched(tmp_path_factory.mktemp("roads"), 2, *there)


def check(ranks: list[Any], row: list[str], first: str) -> None:
    """See that ranks have the same choice and bits, and that nothing is kept beside parameters."""
    assert all(one == ranks[0] for one in ranks)
    assert ranks[0]["candidates"] == row and ranks[0]["until chosen"] == first and ranks[0]["kept"] == 0
    assert ranks[0]["quantiser"] == first and ranks[0]["wire"] == sorted([first, "header", "plain"])


@pytest.mark.parametrize("road", ROADS)
def test_the_default_is_the_same_choice(found: dict[str, list[Any]], road: str) -> None:
    if road not in found:
        pytest.skip(f"not installed: {', '.join(NEEDS[road])}")
    check([rank["found"] for rank in found[road]], ROW, "eden-4")


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


def test_nothing_is_said_where_nothing_is_named(found: dict[str, list[Any]]) -> None:
    for road in set(ROADS) & set(found):
        assert [text for rank in found[road] for text in rank["warnings"]] == [], road


def test_replicas_of_shards_exchange_them_by_the_same_rule(tmp_path: Path) -> None:
    for rank in launched(tmp_path, 4, "mesh")["mesh"]:
        default, sparse = rank["found"]["default"], rank["found"]["sparse"]
        assert default["candidates"] == ROW[:3] and default["quantiser"] == "eden-4"
        assert sparse["candidates"] == [] and sparse["quantiser"] == "eden-4"  # of SGD
        assert all(one["replicas"] == 1 and one["moved"] for one in (default, sparse))
