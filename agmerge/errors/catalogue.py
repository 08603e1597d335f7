# SPDX-License-Identifier: Apache-2.0
"""Codes of errors and warnings: what each means, what to do, and where to read more. docs/errors.md is made of it.

A code never changes its meaning and is never used again. It stands at the beginning of the text, where the text is
raised: ``AGM101: density: ranks disagree ...``.
"""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Mapping, Sequence
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

    code: str  # AGM and three digits: the first digit is the chapter
    title: str  # in plain words, to be read after the code
    cause: str  # "" if the title says it
    remedy: str
    page: str  # of docs/, perhaps with an anchor


@functools.cache
def catalogue() -> tuple[Problem, ...]:
    """Return all problems, by code."""
    rows = (*IN_TRAINING, *OF_ELASTIC, *OF_SETTINGS)
    return tuple(sorted((Problem(*row) for row in rows), key=lambda problem: problem.code))


def code_in(text: str) -> str:
    """Return the first code in ``text``; empty if there is none."""
    found = re.search(r"AGM\d{3}", text)
    return "" if found is None else found[0]


def search(words: str) -> list[Problem]:
    """Return the problems whose title, cause and remedy have most of ``words``, or [] if none has any.

    A word of the title counts more than one of the other texts, and more in a short title. Words of one or two letters
    do not count.
    """
    asked = _words(words)
    scores = {problem: _score(problem, asked) for problem in catalogue()}
    best = max(scores.values())
    return [problem for problem, score in scores.items() if score == best > 0]


def command(code: str) -> str:
    """Return the command that explains a code, which needs no network."""
    return f"python -m agmerge explain {code}"


def page(problems: Sequence[Problem], texts: Mapping[str, str]) -> str:
    """Return docs/errors.md: each problem with the beginning of a text, cause, remedy and page.

    ``texts``: an example by code. Its first sentence is shown, because the remedy has the others.
    """
    parts = [INTRODUCTION]
    chapter = ""
    for problem in problems:
        if problem.code[3] != chapter:
            chapter = problem.code[3]
            parts.append(f"## {CHAPTERS[chapter]}")
        sentence = re.split(r"(?<=\.)\s", texts[problem.code], maxsplit=1)[0]
        example = f"```text\n{textwrap.fill(sentence, 100, break_on_hyphens=False)}\n```"
        words = f"{problem.cause} **Remedy:** {problem.remedy} [Details]({problem.page})".lstrip()
        parts.append(f"### {problem.code}: {problem.title}\n\n{example}\n\n{words}")
    return "\n\n".join(parts) + "\n"


def _score(problem: Problem, asked: set[str]) -> float:
    title = _words(problem.title)
    score = 3 * len(asked & title) + len(asked & _words(f"{problem.cause} {problem.remedy}"))
    return score - len(title) / 100 if score else 0.0


def _words(text: str) -> set[str]:
    return {word for word in re.findall(r"[a-z_]{3,}", text.lower())}


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
INTRODUCTION = """# Errors and warnings

Each error and warning of `agmerge` starts with a code, such as `AGM102`. Search this page for the code, or run
`python -m agmerge explain AGM102`, which needs no network. If you have no code, search by words: `python -m agmerge
explain replicas differ`. In a script, `error.code` is the code of an `agmerge.AGMergeError`.

Most mistakes in arguments raise a `ValueError` or `TypeError` without a code. These texts name the argument, its value
and the values that are possible.

To hide a warning, use its code:

```python
import warnings

warnings.filterwarnings("ignore", message="AGM705")
```

Below is the first sentence of one text for each code. An ellipsis (…) stands for a name, a number or another text.

<!-- Written by `python tests/support/errors_page.py`, from the catalogue in `agmerge/errors`. -->"""
