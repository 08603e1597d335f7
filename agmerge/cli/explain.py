# SPDX-License-Identifier: Apache-2.0
"""Run ``python -m agmerge explain CODE``: what an error means and what to do, without a network."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from agmerge.errors.catalogue import CHAPTERS, Problem, catalogue, search

WIDTH = 100  # columns
DOCS = Path(__file__).resolve().parents[2] / "docs"  # in a checkout


def main(words: Sequence[str]) -> int:
    """Print the entry of a code, such as AGM102, or the entries that fit words; without any the list of all codes.

    Returns the exit code: 1 if there is no such entry, and the list is printed instead.
    """
    asked = " ".join(words).strip(" []:")
    number = asked.upper().removeprefix("AGM")
    known = {problem.code: problem for problem in catalogue()}
    found = [known[f"AGM{number}"]] if f"AGM{number}" in known else search(asked) if asked else []
    if len(found) == 1:
        sys.stdout.write(entry(found[0]))
        return 0
    if found:
        sys.stdout.write(f"Several entries match {asked!r}. Run `python -m agmerge explain CODE` for one of them:\n")
    elif asked:
        sys.stderr.write(f"agmerge explain: no error has the code or the words {asked!r}. All codes:\n")
    sys.stdout.write(contents(found or catalogue()))
    return 0 if found or not asked else 1


def entry(problem: Problem) -> str:
    """Return the text about one problem: its title, cause, remedy and page."""
    name, _, anchor = problem.page.partition("#")
    page = DOCS / name
    place = str(page) if page.is_file() else f"docs/{name} of the source"
    section = f', section "{anchor.replace("-", " ")}"' if anchor else ""
    return "\n".join(
        [
            f"{problem.code}: {problem.title} ({CHAPTERS[problem.code[3]].lower()})",
            "",
            *([_filled(f"Cause: {problem.cause}")] if problem.cause else []),
            _filled(f"What to do: {problem.remedy}"),
            f"See: {place}{section}",
            "",
        ]
    )


def contents(problems: Sequence[Problem]) -> str:
    """Return a line for each problem, by chapter."""
    lines, chapter = [], ""
    for problem in problems:
        if problem.code[3] != chapter:
            chapter = problem.code[3]
            lines.append(f"{CHAPTERS[chapter]}:")
        lines.append(f"  {problem.code}  {problem.title}")
    return "\n".join(lines) + "\n"


def _filled(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)
