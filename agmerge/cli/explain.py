# SPDX-License-Identifier: Apache-2.0
"""Run ``python -m agmerge explain CODE``: what an error means and what to do, without a network."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from agmerge.errors.catalogue import CHAPTERS, Problem, catalogue, find

WIDTH = 100  # columns
DOCS = Path(__file__).resolve().parents[2] / "docs"  # in a checkout


def main(words: Sequence[str]) -> int:
    """Print the entry of a code, such as AGM102, or of an error's own words; without any the list of all codes.

    Returns the exit code: 1 where there is no such entry, and the list is printed instead.
    """
    asked = " ".join(words).strip(" []:")
    number = asked.upper().removeprefix("AGM")
    known = {problem.code: problem for problem in catalogue()}
    problem = known.get(f"AGM{number}") or find(asked)
    if problem is not None and asked:
        sys.stdout.write(entry(problem))
        return 0
    if asked:
        sys.stderr.write(f"agmerge explain: {asked!r} is no code, and in no text of an error. There are:\n")
    sys.stdout.write(contents())
    return 1 if asked else 0


def entry(problem: Problem) -> str:
    """Return the text about one problem: its words, cause, remedy and page."""
    seen = "\n".join(textwrap.indent(_filled(f"“{symptom}”"), "  ") for symptom in problem.symptoms)
    name, _, anchor = problem.page.partition("#")
    page = DOCS / name
    place = str(page) if page.is_file() else f"docs/{name} of the source"
    section = f', section "{anchor.replace("-", " ")}"' if anchor else ""
    return "\n".join(
        [
            f"{problem.code}, {CHAPTERS[problem.code[3]].lower()}. The text has, with … for names and numbers:",
            seen,
            "",
            _filled(f"Cause: {problem.cause}"),
            _filled(f"What to do: {problem.remedy}"),
            f"Read on: {place}{section}",
            "",
        ]
    )


def contents() -> str:
    """Return a line for each code, by chapter."""
    lines, chapter = [], ""
    for problem in sorted(catalogue(), key=lambda each: each.code):
        if problem.code[3] != chapter:
            chapter = problem.code[3]
            lines.append(f"{CHAPTERS[chapter]}:")
        lines.append(f"  {problem.code}  {textwrap.shorten(problem.symptoms[0], WIDTH - 10, placeholder=' …')}")
    return "\n".join(lines) + "\n"


def _filled(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)
