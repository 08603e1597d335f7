# SPDX-License-Identifier: Apache-2.0
"""What a test says that fails because ranks differ: which rank, and where."""

from __future__ import annotations

from typing import Any

import pytest
from support import agreed, difference

CASES: dict[str, tuple[Any, Any, str]] = {
    "by step": (["a", "b", "x", "y"], ["a", "b", "c", "d"], "[2]: 'x' instead of 'c'"),
    "deeper": (
        (1, {"p": [0.0], "q": [1.0, 2.0]}),
        (1, {"p": [0.0], "q": [1.0, 3.0]}),
        "[1]['q'][1]: 2.0 instead of 3.0",
    ),
    "shorter": ([["a"], 1], [["a", "b"], 1], "[0]: ['a'] instead of ['a', 'b']"),
    "other names": ({"p": 1}, {"q": 1}, ": {'p': 1} instead of {'q': 1}"),
    "another kind": ((1,), [1], ": (1,) instead of [1]"),
}


def test_what_all_ranks_found_is_returned() -> None:
    assert agreed([["a", "b"]] * 3) == ["a", "b"]


@pytest.mark.parametrize("case", CASES)
def test_the_first_place_that_differs_is_named(case: str) -> None:
    result, expected, text = CASES[case]
    assert difference(result, expected) == text


def test_the_first_rank_that_differs_is_named() -> None:
    with pytest.raises(AssertionError, match=r"rank 2 is the first that differs.*: \[1\]: 'x' instead of 'b'"):
        agreed([["a", "b"], ["a", "b"], ["a", "x"], ["y", "b"]])


def test_what_is_not_equal_to_itself_was_not_agreed_on() -> None:
    with pytest.raises(AssertionError, match="rank 0"):
        agreed([float("nan"), float("nan")])
