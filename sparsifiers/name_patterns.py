# SPDX-License-Identifier: Apache-2.0
"""Patterns for parameters: regular expressions that must match the full name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

RULE = "Patterns are regular expressions that must match the full parameter name"
EXAMPLE = r".*\.bias"


def compiled(pattern: Any) -> re.Pattern[str]:
    """Compile a pattern for full names of parameters.

    Args:
        pattern: A regular expression, such as ``r".*\\.bias"``.

    Raises:
        ValueError: If it is not a regular expression. If it looks like a glob, the text has the regular expression.
    """
    try:
        return re.compile(pattern)
    except (TypeError, re.error) as error:
        if isinstance(pattern, str) and any(mark in pattern for mark in "*?"):
            raise ValueError(f"{_is_a_glob(pattern)}. {RULE}.") from None
        raise ValueError(f"{pattern!r} is not a pattern ({error}). {RULE}.") from None


def advice(pattern: str, names: Iterable[str]) -> str:
    """Return advice for a pattern that matches none of ``names``: the rule, and a pattern that matches if there is one.

    A pattern that matches as a glob gets its regular expression.
    """
    names = list(names)
    if any(mark in pattern for mark in "*?") and any(fnmatchcase(name, pattern) for name in names):
        return f"{_is_a_glob(pattern)}. {RULE}"
    wider = (f".*{pattern}", f"{pattern}.*", f".*{pattern}.*")
    return f"{RULE}, such as '{next((each for each in wider if _matches(each, names)), EXAMPLE)}'"


def _matches(pattern: str, names: Iterable[str]) -> bool:
    try:
        return any(map(re.compile(pattern).fullmatch, names))
    except re.error:  # of a wider pattern alone
        return False


def _is_a_glob(pattern: str) -> str:
    return f"{pattern!r} looks like a glob, write {_as_regular_expression(pattern)!r}"


def _as_regular_expression(glob: str) -> str:
    """Return the regular expression for a glob: ``.*\\.bias`` for ``*.bias``."""
    parts = re.split(r"(\*+|\?|\[!?[^\]]+\])", glob)
    return "".join(_part(part) for part in parts)


def _part(part: str) -> str:
    """Return the regular expression of one wildcard, or of the text between two."""
    if part.startswith("*"):
        return ".*"
    if part == "?":
        return "."
    if part.startswith("[") and part.endswith("]"):
        return part.replace("[!", "[^", 1)
    return re.escape(part)
