# SPDX-License-Identifier: Apache-2.0
"""Patterns for names of parameters: regular expressions that must match the full name."""

from __future__ import annotations

import re
from typing import Any


def compiled(pattern: Any) -> re.Pattern[str]:
    """Compile a pattern. Raises ``ValueError`` if it is not a regular expression, which shows one for a glob."""
    try:
        return re.compile(pattern)
    except TypeError:
        raise ValueError(f"{pattern!r} is not a pattern, expected a regular expression as a string") from None
    except re.error as error:
        meant = f". Did you mean '{_of_glob(pattern)}'?" if "*" in pattern else ""
        raise ValueError(f"{pattern!r} is not a regular expression ({error}){meant}") from None


def _of_glob(pattern: str) -> str:
    wild = {"*": ".*", "?": "."}
    return "".join(wild.get(letter, re.escape(letter)) for letter in pattern)
