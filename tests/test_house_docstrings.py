# SPDX-License-Identifier: Apache-2.0
"""A function's docstring opens with a plain verb, a class's or a module's may be a noun phrase; none is a riddle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("agmerge", "sparsifiers", "merging")
RIDDLES = ("Tell whether", "Hold", "Let", "Say", "Mark", "Stand", "Be")  # instead: Return whether, a noun, Allow, ...
MOST_RIDDLES = 25  # of all docstrings of the packages
PRONOUNS = re.compile(r"\b(whoever|nobody|somebody|whom|whose)\b", re.IGNORECASE)
MOST_PRONOUNS = 40  # in all their files, texts for people included
OPENS_WITHOUT_VERB = frozenset("What Whether Where Who How Which When The A An This Every Of As Seconds".split())
LARGEST_SHARE = 0.01  # of all docstrings of the packages; there was none when this was written
COLLECTIVE = "Collective. "  # comes first where a function communicates


def texts(source: str) -> Iterator[tuple[ast.AST, str]]:
    """Yield every module, class and function that has a docstring, with it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield node, text


def without_verb(source: str) -> Iterator[tuple[str, bool]]:
    """Yield the first line of every docstring, and whether a function's opens with a word that is no verb."""
    for node, text in texts(source):
        words = text.removeprefix(COLLECTIVE).split(maxsplit=1)
        offends = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not is_property(node)
        yield text.splitlines()[0], offends and words[0].rstrip(".,:") in OPENS_WITHOUT_VERB


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a method is read as an attribute."""
    return any("property" in ast.unparse(each) for each in node.decorator_list)


def is_riddle(text: str) -> bool:
    """Return whether a docstring opens with a word of RIDDLES."""
    opening = text.removeprefix(COLLECTIVE)
    return any(re.match(rf"{word}\b", opening) for word in RIDDLES)


def test_docstrings_open_with_a_verb() -> None:
    lines: list[str] = []
    offenders: list[str] = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for line, offends in without_verb(path.read_text(encoding="utf-8")):
                lines.append(line)
                if offends:
                    offenders.append(f"{path.relative_to(ROOT)}: {line}")
    assert len(lines) > 1000
    assert len(offenders) / len(lines) <= LARGEST_SHARE, "\n".join(offenders)


def test_few_docstrings_are_riddles_and_few_things_are_called_like_people() -> None:
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    sources = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}
    found = [(name, text) for name, source in sources.items() for _, text in texts(source)]
    riddles = [f"{name}: {text.splitlines()[0]}" for name, text in found if is_riddle(text)]
    assert len(riddles) <= MOST_RIDDLES, "\n".join(riddles)
    people = [f"{name}: {word}" for name, one in sources.items() for word in PRONOUNS.findall(one)]
    assert len(people) <= MOST_PRONOUNS, "\n".join(people)


@pytest.mark.parametrize(
    ("text", "riddle"),
    [
        ("Tell whether all are finite.", True),
        ("Collective. Let all ranks wait.", True),
        ("Hold the buffers.", True),
        ("Letters of a word.", False),
        ("Return whether all are finite.", False),
        ("The flat buffers of one device.", False),
    ],
)
def test_riddles_are_known_by_their_opening(text: str, riddle: bool) -> None:
    assert is_riddle(text) is riddle


@pytest.mark.parametrize(
    "text, offends",
    [
        ("Return the sum.", False),
        ("Collective. Return the sum.", False),
        ("Return whether all are finite.", False),
        ("Whether all are finite.", True),
        ("The sum, as of now.", True),
        ("Collective. The sum.", True),
        ("Seconds, for every wait.", True),
        ("As the inner optimizer's.", True),
        ("Ask for it.", False),  # the word, not its beginning
    ],
)
@pytest.mark.parametrize("kind", ["def f():\n    {}", "class A:\n  async def f():\n    {}"])
def test_what_opens_without_a_verb_is_found(kind: str, text: str, offends: bool) -> None:
    assert list(without_verb(kind.format(f'"""{text}"""'))) == [(text, offends)]


@pytest.mark.parametrize("kind", ["{}", "class A:\n    {}", "class A:\n  @property\n  def f():\n    {}"])
def test_classes_modules_and_properties_may_be_noun_phrases(kind: str) -> None:
    assert list(without_verb(kind.format('"""The sum of all."""'))) == [("The sum of all.", False)]


def test_what_has_no_docstring_does_not_count() -> None:
    assert list(without_verb("def f():\n    return 1")) == []
