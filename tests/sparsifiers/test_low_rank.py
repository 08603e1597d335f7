# SPDX-License-Identifier: Apache-2.0
"""What a low-rank compressor is told: its rank, by tensor or for all of them, its seed, and its name."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

import sparsifiers
from sparsifiers import ACPSGD, Compressor, Kind, LowRank, PowerSGD

both = pytest.mark.parametrize("name", ["powersgd", "acpsgd"])


@both
def test_it_is_a_compressor_of_its_own_kind_that_selects_nothing(name: str) -> None:
    made = sparsifiers.low_rank(name)
    assert isinstance(made, LowRank) and isinstance(made, Compressor)
    assert (made.name, made.kind, made.kinds) == (name, Kind.LOW_RANK, {Kind.LOW_RANK})
    assert (made.memory, made.density, made.compresses, made.selects) == ("residual", 1.0, True, False)
    assert made.part(Kind.LOW_RANK) is made and made.part(Kind.SPARSE) is None
    assert made.of_tensor("anything") is made
    assert made.alternates is (name == "acpsgd")


def test_names_are_listed_and_are_no_sparsifiers() -> None:
    assert sparsifiers.low_rank_names() == ("powersgd", "acpsgd")
    assert not set(sparsifiers.low_rank_names()) & set(sparsifiers.names())
    with pytest.raises(ValueError, match="unknown"):
        sparsifiers.get("powersgd")


@pytest.mark.parametrize(
    ("spelled", "kind"),
    [
        ("powersgd", PowerSGD),
        ("PowerSGD", PowerSGD),
        ("Power-SGD", PowerSGD),
        ("power_sgd", PowerSGD),
        ("powerSGD_hook", PowerSGD),
        ("RankKReducer", PowerSGD),
        ("rank-k", PowerSGD),
        ("acpsgd", ACPSGD),
        ("ACP-SGD", ACPSGD),
        ("acp", ACPSGD),
        ("HalfRankKReducer", ACPSGD),
    ],
)
def test_published_names_are_accepted(spelled: str, kind: type[LowRank]) -> None:
    assert sparsifiers.is_low_rank(spelled)
    assert type(sparsifiers.low_rank(spelled, 2)) is kind


def test_a_slip_in_a_name_is_answered_with_the_name() -> None:
    with pytest.raises(ValueError, match="did you mean 'powersgd'"):
        sparsifiers.low_rank("powersdg")


@both
def test_the_rank_is_4_unless_told_otherwise(name: str) -> None:
    assert sparsifiers.low_rank(name).rank == 4 == sparsifiers.low_rank(name).rank_of("layer.weight")
    assert sparsifiers.low_rank(name, 32).rank_of("layer.weight") == 32


@both
@pytest.mark.parametrize("form", [dict, lambda pairs: list(dict(pairs).items()), tuple])
def test_ranks_by_pattern_are_of_whole_names_and_the_first_match_counts(name: str, form: Any) -> None:
    ranks = form((("blocks\\.0\\..*", 8), (".*weight", 2), (".*", 16)))
    made = sparsifiers.low_rank(name, ranks)
    assert [made.rank_of(one) for one in ("blocks.0.weight", "head.weight", "weight.head")] == [8, 2, 16]
    assert [pattern.pattern for pattern, _ in made.patterns] == ["blocks\\.0\\..*", ".*weight", ".*"]


@both
def test_what_no_pattern_names_has_the_default(name: str) -> None:
    made = sparsifiers.low_rank(name, {"head": 1})
    assert [made.rank_of(one) for one in ("head", "header", "a.head")] == [1, 4, 4]


@both
@pytest.mark.parametrize("rank", [0, -1, 1.5, 2.0, True, "4", None, float("nan")], ids=repr)
@pytest.mark.parametrize("by_pattern", [False, True])
def test_a_rank_is_a_whole_number_above_0(name: str, rank: Any, by_pattern: bool) -> None:
    with pytest.raises(ValueError, match=r"rank=.*: expected a whole number > 0, or \{pattern: number\}"):
        sparsifiers.low_rank(name, {"a": 4, "b": rank} if by_pattern else rank)


@both
@pytest.mark.parametrize("pattern", ["(", "*", "a["])
def test_what_is_no_pattern_is_said(name: str, pattern: str) -> None:
    with pytest.raises(ValueError, match="rank=") as error:
        sparsifiers.low_rank(name, {pattern: 2})
    assert repr(pattern) in str(error.value)


@both
@pytest.mark.parametrize("seed", [-1, 1.0, "0", None, True], ids=repr)
def test_a_seed_is_a_whole_number(name: str, seed: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name}: seed=.*: expected a whole number >= 0"):
        sparsifiers.low_rank(name, seed=seed)


@both
def test_an_option_that_it_does_not_have_is_said(name: str) -> None:
    with pytest.raises(TypeError, match="has no option 'density'. Its options: seed"):
        sparsifiers.low_rank(name, 4, density=0.1)


@both
@pytest.mark.parametrize("rank", [4, {"a.*": 2, ".*": 8}])
def test_it_is_made_again_of_its_options_and_survives_a_copy(name: str, rank: Any) -> None:
    made = sparsifiers.low_rank(name, rank, seed=7)
    again = sparsifiers.low_rank(name, **made.options())
    copies = [again, copy.deepcopy(made), pickle.loads(pickle.dumps(made))]
    assert {repr(one) for one in copies} == {repr(made)} and repr(made).startswith(f"{name}(rank=")
    assert all(one.rank_of("abc") == made.rank_of("abc") and one.seed == 7 for one in copies)
