# SPDX-License-Identifier: Apache-2.0
"""Pages, README, messages and public docstrings are in plain words: habits that readers must decode stay below limits.

    python tests/test_house_prose.py                # counts per page and 1,000 words
    python tests/test_house_prose.py --budgets      # write today's counts of texts that are above their limits

A text that was rewritten keeps the limits of tests/support/prose.py. An older one is in prose_budgets.json, with the
counts of its day and a tenth more, so that a small change of it needs no rewriting; such entries only shrink.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.prose import (  # noqa: E402
    EXAMPLE,
    HABITS,
    YOU,
    Habit,
    cells,
    long_sentences,
    prose_of,
    table_rows,
    words_of,
)  # fmt: skip
from tests.support.raised import ROOMS, sources, text  # noqa: E402
from tests.support.syntax import dotted, nodes  # noqa: E402

BUDGETS = Path(__file__).resolve().parent / "support" / "prose_budgets.json"
HEADROOM = 1.1
GENERATED = ("errors", "arguments", "command_line", "api")  # made of texts of the code, which are held below
REFERENCE = frozenset("compressor_reference planners backends environment papers glossary benchmarks".split())
SECTIONS = frozenset("index get_started use_with guides concepts reference".split())
GUIDES = ("with_", "from_")
HOW_TO = frozenset(
    "compressors adaptive low_rank launching checkpoints elastic gpu monitor simulate tutorial will_it_help "
    "installation troubleshooting".split()
)


@cache
def pages() -> dict[str, str]:
    """Return the prose of the README and of the pages for users, by name."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {file.stem: prose_of(file.read_text(encoding="utf-8")) for file in files if file.stem not in GENERATED}


@cache
def messages() -> str:
    """Return the texts of all exceptions and warnings, a line each."""
    trees, found = sources(), []
    for module, tree in trees.items():
        for node in nodes(tree):
            raises = isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args
            warns = isinstance(node, ast.Call) and dotted(node.func) in ("warnings.warn", "warn") and node.args
            call = node.exc if raises else node if warns else None  # type: ignore[union-attr]
            if isinstance(call, ast.Call):
                found.append(" ".join(text(call.args[0], module, trees).split()))
    return "\n\n".join(sorted(set(found)))


@cache
def docstrings() -> str:
    """Return the docstrings of what the packages export, and of its public methods."""
    found = []
    for name in ROOMS:
        package = __import__(name)
        for exported in package.__all__:
            one = getattr(package, exported)
            if inspect.isclass(one) or inspect.isfunction(one):
                found.append(inspect.getdoc(one) or "")
            if inspect.isclass(one):
                found += [inspect.getdoc(m) or "" for n, m in inspect.getmembers(one, callable) if n[0] != "_"]
    return "\n\n".join(dict.fromkeys(prose_of(each.replace("``", "`")) for each in found))


def texts() -> Iterator[tuple[str, str]]:
    """Yield each text that has limits of its own, by name."""
    yield from pages().items()
    yield "messages", messages()
    yield "docstrings", docstrings()


def is_how_to(name: str) -> bool:
    return name in HOW_TO or name.startswith(GUIDES)


def allowed(one: Habit, name: str, words: int) -> int:
    """Return how often a habit may occur in a text: its limit, and once in a short text."""
    if one.name == "a semicolon" and is_how_to(name):
        return 0
    return max(1, math.floor(one.most * words / 1000))


@cache
def budgets() -> dict[str, dict[str, int]]:
    """Return how often habits may occur in texts that were not rewritten: by text and habit."""
    found: dict[str, dict[str, int]] = json.loads(BUDGETS.read_text(encoding="utf-8"))
    return found


def above() -> Iterator[tuple[str, Habit, int, list[str]]]:
    """Yield each habit of which a text has too many: the text's name, the habit, its limit and the sentences."""
    for name, body in texts():
        for one in HABITS:
            places = list(one.places(body))
            most = allowed(one, name, words_of(body))
            if len(places) > most:
                yield name, one, most, places


def test_no_text_has_more_of_a_habit_than_its_limit() -> None:
    told = [
        f"{name}: {one.name}, {len(places)} times, at most {limit}. Write {one.instead}. " + " / ".join(places[:5])
        for name, one, most, places in above()
        if len(places) > (limit := max(most, math.floor(HEADROOM * budgets().get(name, {}).get(one.name, 0))))
    ]
    assert told == []


def test_a_budget_that_a_text_no_longer_needs_is_gone() -> None:
    over = {(name, one.name) for name, one, _, _ in above()}
    assert [key for name, kept in budgets().items() for key in kept if (name, key) not in over] == []


@pytest.mark.parametrize("one", HABITS, ids=lambda one: one.name)
def test_all_pages_together_keep_the_limits(one: Habit) -> None:
    found = [place for body in pages().values() for place in one.places(body)]
    words = sum(map(words_of, pages().values()))
    assert len(found) <= one.most * words / 1000, f"write {one.instead}: " + "\n".join(found[:40])


def test_how_to_pages_and_the_readme_address_the_reader() -> None:
    bodies = {name: body for name, body in pages().items() if is_how_to(name) or name == "README"}
    rates = {name: 1000 * len(YOU.findall(body)) / words_of(body) for name, body in bodies.items()}
    assert {name: round(rate) for name, rate in rates.items() if rate < 10} == {}, "you, or an imperative with your"


def test_pages_have_examples_and_tables_only_for_looking_up() -> None:
    words = sum(map(words_of, pages().values()))
    examples = sum(len(EXAMPLE.findall(body)) for body in pages().values())
    in_tables = sum(words_of(row) for body in pages().values() for row in table_rows(body))
    assert 1000 * examples / words >= 1.0
    assert in_tables / words <= 0.25
    assert [f"{name}: {cell}" for name, body in pages().items() for cell in cells(body) if len(cell) > 200] == []


def test_guides_have_few_long_sentences() -> None:
    found = [
        f"{name}: {one}" for name, body in pages().items() if name not in REFERENCE for one in long_sentences(body)
    ]
    assert len(found) <= 25, "\n".join(found)


def test_how_to_pages_are_short_and_show_code() -> None:
    for name in pages():
        if is_how_to(name):
            whole = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
            assert "```" in whole, name
            assert words_of(pages()[name]) <= 1400, name


def test_a_habit_is_found_in_its_sentence_and_not_in_code() -> None:
    page = "You pass it. What is sent is `what is not`.\n\n```\nwhat is code; to the bit\n```\n| what | a |\n"
    told, bits = (next(one for one in HABITS if one.name == name) for name in ("a what-clause", "to the bit"))
    assert list(told.places(prose_of(page))) == ["What is sent is CODE."]
    assert list(bits.places(prose_of(page))) == []


def main() -> None:
    """Print the counts per 1,000 words, or write the budgets."""
    if "--budgets" in sys.argv:
        made: dict[str, dict[str, int]] = {}
        for name, one, _, places in above():
            made.setdefault(name, {})[one.name] = len(places)
        BUDGETS.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return
    print(f"{'':22}{'words':>7}", *[f"{one.name[-11:]:>12}" for one in HABITS], sep="")
    for name, body in texts():
        words = words_of(body)
        rates = [1000 * len(list(one.places(body))) / words for one in HABITS]
        print(f"{name:22}{words:7}", *[f"{rate:12.1f}" for rate in rates], sep="")


if __name__ == "__main__":
    main()
