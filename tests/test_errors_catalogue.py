# SPDX-License-Identifier: Apache-2.0
"""Every error and warning of the library begins with a code of the catalogue; the page is up to date."""

from __future__ import annotations

import ast
import pickle
import re
import sys
from pathlib import Path

import pytest
from support.errors_page import written
from support.raised import begins_with_code, raised, sources
from support.syntax import nodes

import agmerge
from agmerge.__main__ import main
from agmerge.errors.catalogue import SITE, SOURCE, catalogue, code_in, command, search

ROOT = Path(__file__).resolve().parents[1]
# Known only when it runs: the text of another place, of another rank or of a library. It begins with a code if it is
# the library's.
ELSEWHERE = {
    "agmerge.backends.horovod: advice",
    "agmerge.backends.streams: problem",
    "agmerge.backends.torch_store: 'init()'",
    "agmerge.checkpoint.rank_state: other_part",
    "agmerge.cli.build_horovod: "
    "'\\n'.join([*lines[-30:], *errors, f'{failure} (exit code {done.returncode}, full log: {log})'])",
    "agmerge.engine.reducer: f'{error}. {AFTER_BROKEN}'",
    "agmerge.errors: text",
    "agmerge.integrations.files: problem",
}
# For those who work on the library.
WITHOUT = ELSEWHERE | {
    "agmerge.backends.base: f'{name}: {code.co_name}() in {code.co_filename}, line {code.co_firstlineno}, "
    "starts a collective; let its docstring open with {MARK!r}'",
    "agmerge.cli.build_horovod: "
    "f'{file.name} of Horovod {VERSION} contains {old!r} {text.count(old)} times, expected {times}'",
}
CODES = {problem.code for problem in catalogue()}


def test_codes_are_unique_and_in_a_chapter() -> None:
    codes = [problem.code for problem in catalogue()]
    assert len(codes) > 60 and len(set(codes)) == len(codes)
    assert [code for code in codes if not re.fullmatch(r"AGM[0-7]\d\d", code)] == []
    titles = [problem.title for problem in catalogue()]
    assert len(set(titles)) == len(titles)


def test_the_page_is_up_to_date_and_leads_somewhere() -> None:
    assert (ROOT / "docs" / "errors.md").read_text(encoding="utf-8") == written(), "python tests/support/errors_page.py"
    for problem in catalogue():
        name, _, anchor = problem.page.partition("#")
        heads = re.findall(r"^#+ (.+)$", (ROOT / "docs" / name).read_text(encoding="utf-8"), re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
        assert not anchor or anchor in slugs, problem.page


def test_every_error_and_warning_begins_with_a_code_at_its_place() -> None:
    """An entry of the list that is gone, or has a code by now, is taken off it."""
    found = list(raised(sources()))
    without = {place for place, words in found if not begins_with_code(words)}
    assert len(found) > 100
    assert sorted(without - WITHOUT) == [], "begin the text with a code of agmerge/errors/problems_*.py"
    assert sorted(WITHOUT - without) == []
    assert {code_in(words) for _, words in found if begins_with_code(words)} <= CODES


def test_every_code_is_raised_and_every_code_in_the_sources_has_an_entry() -> None:
    texts = [
        node.value
        for module, tree in sources().items()
        if not module.startswith("agmerge.errors.")
        for node in nodes(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert {code_in(text) for text in texts if begins_with_code(text)} == CODES
    assert {code for text in texts for code in re.findall(r"AGM\d{3}", text)} <= CODES


def test_no_text_links_to_a_host_that_does_not_exist() -> None:
    """The site has no home yet: its placeholder is for the package's metadata alone."""
    hosts = (SITE, SOURCE)
    assert [host for host in hosts if host in (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")] == []
    constants = [
        node.value
        for module, tree in sources().items()
        if module != "agmerge.errors.catalogue"
        for node in nodes(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert [text for text in constants if "agmerge.example" in text] == []


def test_an_error_has_its_code_wherever_it_stands_in_the_text() -> None:
    error = agmerge.RankMismatchError("AGM101: density: ranks disagree on density: 0.01 on rank 0; 0.02 on rank 1")
    assert error.code == "AGM101" and str(error).endswith("rank 1")
    assert agmerge.AGMergeError(f"buffer 3: {error}").code == "AGM101"
    assert agmerge.AGMergeError("something else").code == ""
    if sys.version_info >= (3, 11):
        assert error.__notes__ == pickle.loads(pickle.dumps(error)).__notes__ == ["python -m agmerge explain AGM101"]


def test_the_command_that_an_error_prints_explains_it_without_a_network(capsys: pytest.CaptureFixture[str]) -> None:
    for problem in catalogue():
        asked = command(problem.code).removeprefix("python -m agmerge ").split()
        assert asked[1] == problem.code and main(asked) == 0
        shown = " ".join(capsys.readouterr().out.split())
        parts = (problem.code, problem.title, problem.cause, problem.remedy, problem.page.partition("#")[0])
        assert [part for part in parts if part not in shown] == []


@pytest.mark.parametrize("asked", ["agm102", "102", "AGM102:", "[AGM102", "replicas differ, first in parameter"])
def test_a_code_may_be_copied_as_it_stands_and_words_are_searched(
    asked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *asked.split()]) == 0
    assert capsys.readouterr().out.startswith("AGM102: replicas differ")


def test_words_of_a_text_find_its_problem() -> None:
    assert [problem.code for problem in search("gradients exchanged twice")] == ["AGM107"]


@pytest.mark.parametrize(("asked", "code"), [((), 0), (("AGM999",), 1)])
def test_without_a_code_that_is_known_all_are_listed(
    asked: tuple[str, ...], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *asked]) == code
    captured = capsys.readouterr()
    assert [problem.code for problem in catalogue() if f"  {problem.code}  " not in captured.out] == []
    assert ("'AGM999'" in captured.err) is bool(asked)


def test_words_that_fit_several_problems_list_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(search("worker")) > 1 and search("xyzzy") == []
    assert main(["explain", "worker"]) == 0
    assert "AGM203" in capsys.readouterr().out
