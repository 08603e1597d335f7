"""A docstring says what to do, or what is done: it opens with a verb, so that one can read on without the caller."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("agmerge", "sparsifiers", "merging")
OPENS_WITHOUT_VERB = frozenset("What Whether Where Who How Which When The A An This Every Of As Seconds".split())
LARGEST_SHARE = 0.01  # of all docstrings of the packages; there was none when this was written
COLLECTIVE = "Collective. "  # comes first where a function communicates


def without_verb(source: str) -> Iterator[tuple[str, bool]]:
    """Yield the first line of every docstring, and whether it opens with a word that is no verb."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                words = text.removeprefix(COLLECTIVE).split(maxsplit=1)
                yield text.splitlines()[0], words[0].rstrip(".,:") in OPENS_WITHOUT_VERB


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


@pytest.mark.parametrize(
    "text, offends",
    [
        ("Return the sum.", False),
        ("Collective. Return the sum.", False),
        ("Tell whether all are finite.", False),
        ("Whether all are finite.", True),
        ("The sum, as of now.", True),
        ("Collective. The sum.", True),
        ("Seconds, for every wait.", True),
        ("As the inner optimizer's.", True),
        ("Ask for it.", False),  # the word, not its beginning
    ],
)
@pytest.mark.parametrize("kind", ["{}", "class A:\n    {}", "def f():\n    {}", "class A:\n  async def f():\n    {}"])
def test_what_opens_without_a_verb_is_found(kind: str, text: str, offends: bool) -> None:
    assert list(without_verb(kind.format(f'"""{text}"""'))) == [(text, offends)]


def test_what_has_no_docstring_does_not_count() -> None:
    assert list(without_verb("def f():\n    return 1")) == []
