# SPDX-License-Identifier: Apache-2.0
"""Patterns are regular expressions for full names; one that looks like a glob raises an error with the expression."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import sparsifiers
from sparsifiers import name_patterns

GLOBS = {
    "*.bias": r".*\.bias",
    "*": ".*",
    "**.weight": r".*\.weight",
    "?.weight": r".\.weight",
    "*.h.[!0].fc": r".*\.h\.[^0]\.fc",
    "*norm*": ".*norm.*",
}


@pytest.mark.parametrize("glob", GLOBS)
def test_the_error_of_a_glob_has_the_regular_expression(glob: str) -> None:
    with pytest.raises(ValueError) as raised:
        name_patterns.compiled(glob)
    assert f"{glob!r} looks like a glob, write {GLOBS[glob]!r}" in str(raised.value)
    assert "regular expressions that must match the full parameter name" in str(raised.value)
    re.compile(GLOBS[glob])


@pytest.mark.parametrize("pattern", ["(", 3, None])
def test_anything_else_that_is_no_expression_says_why(pattern: Any) -> None:
    with pytest.raises(ValueError, match="is not a pattern .*regular expressions that must match the full") as raised:
        name_patterns.compiled(pattern)
    assert repr(pattern) in str(raised.value)


def test_a_glob_that_is_an_expression_too_is_found_by_the_names() -> None:
    names = ["layers.0.weight", "layers.0.bias"]
    assert name_patterns.advice("layers[0-9]", names) == f"{name_patterns.RULE}, such as '.*\\.bias'"
    assert name_patterns.advice("bias", names) == f"{name_patterns.RULE}, such as '.*bias'"
    assert r"write 'layers\\..\\.weight'" in name_patterns.advice("layers.?.weight", names)
    assert r"write 'l.*\\.bias'" in name_patterns.advice("l*.bias", names)


@pytest.mark.parametrize(
    "made",
    [
        lambda glob: sparsifiers.low_rank("powersgd", rank={glob: 2}),
        lambda glob: sparsifiers.ACPSGD(rank=[(glob, 2)]),
        lambda glob: sparsifiers.ByName([(glob, sparsifiers.get("topk"))]),
    ],
    ids=["rank", "pairs", "by name"],
)
def test_compressors_that_take_patterns_say_it(made: Callable[[str], Any]) -> None:
    with pytest.raises(ValueError, match="looks like a glob") as raised:
        made("*.bias")
    assert repr(r".*\.bias") in str(raised.value)
