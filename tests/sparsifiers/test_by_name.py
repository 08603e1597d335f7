# SPDX-License-Identifier: Apache-2.0
"""A compressor that is others by pattern: the first that matches counts; at most one of each kind compresses."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

import sparsifiers
from agmerge.options.compressors import Cast
from sparsifiers import ByName, Compressor, Kind, PowerSGD

TOPK = sparsifiers.get("topk", 0.02)
FACTORS = PowerSGD(2)
WHOLE = Cast("none")
HYBRID = ByName([(".*emb.*", TOPK), (".*norm.*", WHOLE), (".*", FACTORS)])


class Remembering(Compressor):
    """One with state."""

    name = "remembering"
    kind = Kind.SPARSE

    def __init__(self) -> None:
        self.kept: dict[str, object] = {}

    def state_dict(self) -> dict[str, object]:
        return dict(self.kept)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.kept = dict(state)

    def retain(self, keys: Iterable[str]) -> None:
        wanted = set(keys)
        self.kept = {key: value for key, value in self.kept.items() if key in wanted}


def test_the_first_pattern_that_matches_a_whole_name_counts() -> None:
    assert HYBRID.of_tensor("wte.emb.weight") is TOPK
    assert HYBRID.of_tensor("emb.norm.weight") is TOPK  # also the second one matches
    assert HYBRID.of_tensor("block.norm") is WHOLE
    assert HYBRID.of_tensor("block.weight") is FACTORS


def test_what_no_pattern_names_goes_to_the_last() -> None:
    made = ByName([("head", TOPK), ("body", FACTORS)])
    assert [made.of_tensor(name) for name in ("head", "body", "header", "my.head")] == [TOPK, FACTORS, FACTORS, FACTORS]


def test_it_is_of_the_kinds_that_compress() -> None:
    assert HYBRID.kinds == {Kind.SPARSE, Kind.LOW_RANK}
    assert (HYBRID.part(Kind.SPARSE), HYBRID.part(Kind.LOW_RANK), HYBRID.part(Kind.DENSE)) == (TOPK, FACTORS, WHOLE)
    assert HYBRID.selects and HYBRID.compresses
    assert (HYBRID.density, HYBRID.memory) == (0.02, "residual")
    assert ByName([("a", FACTORS), (".*", WHOLE)]).kinds == {Kind.LOW_RANK}
    assert ByName([("a", FACTORS), (".*", WHOLE)]).density == 1.0
    assert [pattern.pattern for pattern in HYBRID.patterns] == [".*emb.*", ".*norm.*", ".*"]


def test_it_has_the_rank_the_patterns_and_the_parts_of_what_it_consists_of() -> None:
    ranks = PowerSGD({"block.*": 2, "head": 8})
    made = ByName([("emb", TOPK), (".*", ranks)])
    assert (TOPK.rank, FACTORS.rank, HYBRID.rank, made.rank) == (None, 2, 2, ranks.rank)
    given = {option: [pattern.pattern for pattern in patterns] for option, patterns in made.name_patterns().items()}
    assert given == {"compression": ["emb", ".*"], "rank": ["block.*", "head"]} and TOPK.name_patterns() == {}
    other = sparsifiers.get("randomk", 0.1)
    assert TOPK.replaced(other) is other and made.replaced(other).part(Kind.SPARSE) is other
    assert made.replaced(other).part(Kind.LOW_RANK) is ranks


@pytest.mark.parametrize(
    ("shape", "shrinks"), [((9,), False), ((4, 4), False), ((4, 5), True), ((2, 100), False), ((5, 2, 2), True)]
)
def test_factors_shrink_a_matrix_of_more_elements_than_they_have(shape: tuple[int, ...], shrinks: bool) -> None:
    assert FACTORS.shrinks("any", shape) is shrinks and TOPK.shrinks("any", shape)


def test_coordinates_are_the_same_on_all_ranks_if_its_sparsifiers_are() -> None:
    assert not HYBRID.same_on_all_ranks
    assert ByName([("a", sparsifiers.get("randomk")), (".*", FACTORS)]).same_on_all_ranks
    assert not ByName([("a", FACTORS), (".*", WHOLE)]).same_on_all_ranks


@pytest.mark.parametrize(
    "parts",
    [
        [("a", TOPK), ("b", sparsifiers.get("randomk", 0.02))],
        [("a", TOPK), ("b", sparsifiers.get("topk", 0.03))],
        [("a", FACTORS), ("b", sparsifiers.low_rank("acpsgd", 2))],
        [("a", FACTORS), ("b", PowerSGD(4))],
        [("a", TOPK), ("b", Cast("bf16")), (".*", WHOLE)],
    ],
)
def test_two_that_differ_of_one_kind_are_refused(parts: Any) -> None:
    """There is one tensor class of each kind."""
    with pytest.raises(ValueError, match="are of the same kind, .* at most one of each kind"):
        ByName(parts)


def test_the_same_one_may_come_twice() -> None:
    made = ByName([("a", TOPK), ("b", FACTORS), ("c", sparsifiers.get("topk", 0.02)), (".*", WHOLE)])
    assert made.of_tensor("c").kind is Kind.SPARSE and made.kinds == {Kind.SPARSE, Kind.LOW_RANK}


@pytest.mark.parametrize("parts", [[], [(".*", WHOLE)], [(".*", Cast("fp16"))]])
def test_one_that_compresses_nothing_is_refused(parts: Any) -> None:
    with pytest.raises(ValueError, match="compression by pattern: expected at least one"):
        ByName(parts)


@pytest.mark.parametrize("pattern", ["(", "*", 3, None], ids=repr)
def test_what_is_no_pattern_is_refused(pattern: Any) -> None:
    with pytest.raises(ValueError, match="compression by pattern: "):
        ByName([(pattern, TOPK)])


def test_one_part_can_be_replaced() -> None:
    other = sparsifiers.get("randomk", 0.5)
    made = HYBRID.replaced(other)
    assert made.of_tensor("emb") is other and made.of_tensor("weight") is FACTORS and made.patterns == HYBRID.patterns
    assert HYBRID.of_tensor("emb") is TOPK


def test_states_are_those_of_its_parts_by_name() -> None:
    part = Remembering()
    made = ByName([("a", part), (".*", FACTORS)])
    assert made.state_dict() == {}
    part.kept = {"a": 1, "b": 2}
    saved, before = made.state_dict(), made.snapshot()
    assert saved == {"remembering": {"a": 1, "b": 2}}
    made.retain(["b", "c"])
    assert part.kept == {"b": 2}
    made.load_state_dict(saved)
    assert part.kept == {"a": 1, "b": 2}
    made.load_state_dict({})
    assert part.kept == {}
    made.load_state_dict(before)
    assert part.kept == {"a": 1, "b": 2}
    with pytest.raises(ValueError, match="has no part topk"):
        made.load_state_dict({"topk": {}})


def test_it_says_what_it_is_and_survives_a_copy() -> None:
    assert "topk" in repr(HYBRID) and "powersgd(rank=2, seed=0)" in repr(HYBRID) and ".*emb.*" in repr(HYBRID)
    again = pickle.loads(pickle.dumps(HYBRID))
    assert repr(again) == repr(HYBRID) and again.of_tensor("emb").kind is Kind.SPARSE
    assert repr(HYBRID) != repr(ByName([(".*emb.*", TOPK), (".*norm.*", WHOLE), (".*", PowerSGD(3))]))
