# SPDX-License-Identifier: Apache-2.0
"""Codes of errors and warnings: what each means, what to do, and where to read on. docs/errors.md is made of it.

A code never changes its meaning and is never used again. A text finds its code by words of its own, so that the place
that raises need not know of codes: the first problem counts of which a symptom is in the text. ``…`` is anything.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from agmerge.errors.problems_in_training import IN_TRAINING
from agmerge.errors.problems_of_elastic import OF_ELASTIC
from agmerge.errors.problems_of_settings import OF_SETTINGS

# Where the project lives. Placeholders (``.example`` is reserved) until it has a home: change them here, and all links
# follow, those of the metadata and of the page on the package index. A release with placeholders is refused.
SITE = "https://agmerge.example"  # the documentation, without a slash at its end
SOURCE = "https://agmerge.example/source"  # the repository: /blob/TAG/PATH, /raw/TAG/PATH and /issues are there


@dataclass(frozen=True)
class Problem:
    """Problem that a user may meet."""

    code: str  # AGM and three digits: the hundreds are the chapter
    symptoms: tuple[str, ...]  # parts of texts; the first is the heading
    cause: str
    remedy: str
    page: str  # of docs/, with an anchor perhaps

    def matches(self, text: str) -> bool:
        """Return whether a symptom is in ``text``."""
        return any(pattern(symptom).search(text) for symptom in self.symptoms)


@functools.cache
def catalogue() -> tuple[Problem, ...]:
    """Return all problems, in the order in which a text is looked up."""
    return tuple(Problem(*row) for row in (*OF_ELASTIC, *IN_TRAINING, *OF_SETTINGS))


@functools.cache
def pattern(symptom: str) -> re.Pattern[str]:
    """Return the pattern of a symptom."""
    return re.compile(".*?".join(map(re.escape, symptom.split("…"))), re.DOTALL)


def find(text: str) -> Problem | None:
    """Return the problem of a text; None: it has no code."""
    return next((problem for problem in catalogue() if problem.matches(text)), None)


def address(problem: Problem) -> str:
    """Return the code with the command that explains it, which needs no network."""
    return f"[{problem.code}: python -m agmerge explain {problem.code}]"


def page(problems: Sequence[Problem]) -> str:
    """Return docs/errors.md: each problem with its symptoms, cause, remedy and page."""
    parts = [INTRODUCTION]
    chapter = ""
    for problem in sorted(problems, key=lambda problem: problem.code):
        if problem.code[3] != chapter:
            chapter = problem.code[3]
            parts.append(f"## {CHAPTERS[chapter]}")
        seen = "; ".join(f"“{symptom}”" for symptom in problem.symptoms)
        parts.append(
            f"### {problem.code}\n\n{seen}\n\n{problem.cause} **What to do:** {problem.remedy} "
            f"Read on: [{problem.page}]({problem.page})."
        )
    return "\n\n".join(parts) + "\n"


CHAPTERS = {
    "0": "Starting",
    "1": "Steps and gradients",
    "2": "Waiting for other workers",
    "3": "Arguments",
    "4": "Checkpoints",
    "5": "Messages",
    "6": "Frameworks",
    "7": "Reports and speed",
}
INTRODUCTION = """# Errors and warnings by their words

An error of `agmerge` carries a code, `error.code`. From Python 3.11 on it is printed below the text, with the command
that shows its entry without a network: `python -m agmerge explain AGM102`. Warnings, and mistakes in arguments
(`ValueError`, `TypeError`), are found here, or by that command, by their words. In these an ellipsis stands for names
and numbers.

This page is written by `python tests/support/errors_page.py`, from the catalogue beside `agmerge.errors`."""
