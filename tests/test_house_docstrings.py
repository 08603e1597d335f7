# SPDX-License-Identifier: Apache-2.0
"""A function's docstring opens with a plain verb, a class's or a module's may be a noun phrase; none is a riddle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.syntax import nodes, parsed

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("agmerge", "sparsifiers", "merging")
RIDDLES = ("Tell whether", "Hold", "Let", "Say", "Mark", "Stand", "Be")  # instead: Return whether, a noun, Allow, ...
# Limits are of a file, so that a change of one file is held to what is in it: there is no budget that others use up.
MOST_RIDDLES = 3  # of the docstrings of a file
PRONOUNS = re.compile(r"\b(whoever|nobody|somebody|whom|whose)\b", re.IGNORECASE)
MOST_IN_A_FILE = 3  # such words, texts for people included
WRITE = "name the worker or the script, or write 'of which', 'its' or 'no worker' instead"
OPENS_WITHOUT_VERB = frozenset("What Whether Where Who How Which When The A An This Every Of As Seconds".split())
COLLECTIVE = "Collective. "  # comes first where a function communicates


def texts(source: str) -> Iterator[tuple[ast.AST, str]]:
    """Yield every module, class and function that has a docstring, with it."""
    for node in nodes(parsed(source)):
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
    offenders: list[str] = []  # of a file: none is allowed
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for line, offends in without_verb(path.read_text(encoding="utf-8")):
                lines.append(line)
                if offends:
                    offenders.append(f"{path.relative_to(ROOT)}: {line}")
    assert len(lines) > 1000
    assert offenders == [], "begin these with a verb, such as Return, and no noun: " + "\n".join(offenders)


def test_few_docstrings_are_riddles_and_few_things_are_called_like_people() -> None:
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    sources = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}
    assert [told for name, source in sources.items() for told in too_many(name, source)] == []


def too_many(name: str, source: str) -> list[str]:
    """Return what to write otherwise in a file: each place, where there are more than a few."""
    riddles = [f"{name}: {text.splitlines()[0]}" for _, text in texts(source) if is_riddle(text)]
    people = [
        f"{name}:{number}: {word!r}: {WRITE}"
        for number, line in enumerate(source.splitlines(), 1)
        for word in PRONOUNS.findall(line)
    ]
    begin = "begin it with another verb, such as Return whether, or a noun"
    told = [f"{riddle!r}: {begin}" for riddle in riddles] if len(riddles) > MOST_RIDDLES else []
    return told + (people if len(people) > MOST_IN_A_FILE else [])


def test_a_file_that_has_too_many_is_named_with_its_lines_and_what_to_write() -> None:
    few = "\n".join(["# whose"] * MOST_IN_A_FILE)
    assert too_many("a.py", few) == []
    told = too_many("a.py", f"{few}\n\n# nobody\n")
    assert len(told) == MOST_IN_A_FILE + 1 and told[-1] == f"a.py:{MOST_IN_A_FILE + 2}: 'nobody': {WRITE}"
    riddles = "\n\n".join(f"def f{number}():\n    'Hold it.'" for number in range(MOST_RIDDLES + 1))
    assert len(too_many("a.py", riddles)) == MOST_RIDDLES + 1


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
