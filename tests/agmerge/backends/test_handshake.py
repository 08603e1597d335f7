# SPDX-License-Identifier: Apache-2.0
"""Agreement (guarantee G1): all ranks pass, or all raise the same error that names the first difference."""

from __future__ import annotations

import pytest

from agmerge import testing
from agmerge.backends.handshake import (
    Fact,
    broadcast_bytes,
    first_difference,
    gather_bytes,
    gather_texts,
    ranks_of,
    require_agreement,
)
from agmerge.errors import PeerLost, RankMismatchError
from agmerge.runtime import workers

WAIT = 30.0
FACTS: list[Fact] = [("density", "0.01"), ("tensor 0", "weight float32[3, 4]"), ("tensor 1", "bias float32[4]")]


def disagree(said: list[list[Fact]]) -> str:
    """Every rank states its own facts; the text of the error that all of them must raise."""

    def body(rank: int) -> None:
        require_agreement(workers.world(), said[rank], what="set-up", advice="Do the same.", timeout=WAIT)

    errors = testing.run(len(said), body, return_errors=True, inject=testing.jitter(len(said)))
    assert [type(error) for error in errors] == [RankMismatchError] * len(said)
    (text,) = {str(error) for error in errors}
    return text


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("facts", [FACTS, [], [("name", "")], [("Ω", "ä\n\0")]])
def test_equal_facts_pass_with_one_small_collective(size: int, facts: list[Fact]) -> None:
    def body(rank: int) -> list[tuple[str, str, int]]:
        require_agreement(workers.world(), list(facts), what="set-up", advice="", timeout=WAIT)
        return testing.calls()

    assert testing.run(size, body) == [[("all_gather", "set-up/digest", 16)]] * size


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("field", range(len(FACTS)))
def test_one_differing_value_is_named_with_both_values_and_their_ranks(size: int, field: int) -> None:
    for odd in range(size):
        said = [list(FACTS) for _ in range(size)]
        name, value = FACTS[field]
        said[odd][field] = (name, "something else")
        others = [str(rank) for rank in range(size) if rank != odd]
        held = f"{value} on {'rank' if size == 2 else 'ranks'} {', '.join(others)}"
        mine = f"something else on rank {odd}"
        both = f"{mine}; {held}" if odd == 0 else f"{held}; {mine}"
        assert disagree(said) == f"AGM101: set-up: ranks disagree on {name}: {both}. Do the same."


def test_only_the_first_difference_is_named() -> None:
    said = [list(FACTS), [FACTS[0], ("tensor 0", "weight float32[3]"), ("tensor 1", "bias float16[4]")]]
    text = disagree(said)
    assert "tensor 0" in text and "float32[3, 4]" in text and "float32[3]" in text
    assert "tensor 1" not in text and "density" not in text


def test_three_values_are_all_shown() -> None:
    said: list[list[Fact]] = [[("density", value)] for value in ("0.1", "0.2", "0.1", "0.3")]
    assert "ranks disagree on density: 0.1 on ranks 0, 2; 0.2 on rank 1; 0.3 on rank 3." in disagree(said)


@pytest.mark.parametrize("short", [0, 1, 2])
def test_a_missing_entry_is_named(short: int) -> None:
    said = [list(FACTS) for _ in range(3)]
    said[short] = FACTS[:2]
    text = disagree(said)
    assert "ranks disagree on tensor 1:" in text
    assert f"nothing on rank {short}" in text
    others = ", ".join(str(rank) for rank in range(3) if rank != short)
    assert f"bias float32[4] on ranks {others}" in text


def test_no_facts_against_some() -> None:
    text = disagree([[], list(FACTS)])
    assert "ranks disagree on density: nothing on rank 0; 0.01 on rank 1" in text


def test_different_names_at_the_same_place_are_shown() -> None:
    text = disagree([[("op", "sum")], [("root_rank", "1")]])
    assert "ranks disagree on entry 0: op sum on rank 0; root_rank 1 on rank 1" in text


def test_facts_in_another_order_differ() -> None:
    text = disagree([list(FACTS), [FACTS[0], FACTS[2], FACTS[1]]])
    assert "entry 1: tensor 0 weight float32[3, 4] on rank 0; tensor 1 bias float32[4] on rank 1" in text


def test_a_boundary_between_name_and_value_is_not_lost() -> None:
    assert "entry 0" in disagree([[("ab", "c")], [("a", "bc")]])


def test_first_difference_and_ranks_of_are_pure() -> None:
    assert first_difference([[["a", "1"]], [["a", "2"]]]) == "ranks disagree on a: 1 on rank 0; 2 on rank 1"
    assert ranks_of(["x", "y", "x"], "x") == "ranks 0, 2"
    assert ranks_of(["x", "y", "x"], "y") == "rank 1"


def test_the_name_of_the_collectives_can_differ_from_the_occasion() -> None:
    def body(rank: int) -> None:
        require_agreement(workers.world(), [("rank", str(rank))], what="a", advice="", timeout=WAIT, name="b")

    def alone(rank: int) -> None:
        if rank == 0:
            require_agreement(workers.world(), [], what="a", advice="", timeout=WAIT, name="b")

    errors = testing.run(2, body, return_errors=True)
    assert {str(error) for error in errors} == {"AGM101: a: ranks disagree on rank: 0 on rank 0; 1 on rank 1. "}
    (error, _) = testing.run(2, alone, return_errors=True)
    assert isinstance(error, PeerLost) and str(error).startswith("AGM206: b/digest: rank 1")


@pytest.mark.parametrize("texts", [[b""], [b"", b""], [b"", b"abc", b""], [b"\0", b"\0\0", b"x\0y\0", b""]])
def test_texts_of_any_length(texts: list[bytes]) -> None:
    def body(rank: int) -> list[bytes]:
        return gather_texts(workers.world(), texts[rank], "texts", WAIT)

    assert testing.run(len(texts), body) == [texts] * len(texts)


@pytest.mark.parametrize("length", [0, 1, 16])
def test_bytes_of_one_length(length: int) -> None:
    def body(rank: int) -> list[bytes]:
        return gather_bytes(workers.world(), bytes([rank]) * length, "bytes", WAIT)

    assert testing.run(3, body) == [[bytes([rank]) * length for rank in range(3)]] * 3


@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.parametrize("data", [b"", b"\0", b"plan" * 1000])
def test_broadcast_takes_the_roots_bytes_only(root: int, data: bytes) -> None:
    def body(rank: int) -> bytes:
        mine = data if rank == root else b"ignored" * rank
        return broadcast_bytes(workers.world(), mine, root, "data", WAIT)

    assert testing.run(3, body) == [data] * 3
