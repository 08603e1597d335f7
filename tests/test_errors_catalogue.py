# SPDX-License-Identifier: Apache-2.0
"""Every error and warning of the library has a code, or is in a list that only shrinks; the page is up to date."""

from __future__ import annotations

import ast
import pickle
import re
import sys
from pathlib import Path

import pytest
from support.raised import UNKNOWN, raised, sources

import agmerge
from agmerge.__main__ import main
from agmerge.errors.catalogue import address, catalogue, find, page

ROOT = Path(__file__).resolve().parents[1]
# Known only when it runs: the text of another place, of another rank or of a library. It may have a code then.
ELSEWHERE = {
    "agmerge.backends.handshake: f'{what}: {first_difference(stated)}. {advice}'",
    "agmerge.backends.horovod: advice",
    "agmerge.backends.horovod: f'{name}: {error}'",
    "agmerge.backends.local: f'{self._name}: {'; '.join(gone)}'",
    "agmerge.backends.local: late",
    "agmerge.backends.shared_gpus: problem",
    "agmerge.backends.torch_store: 'init()'",
    "agmerge.checkpoint.rank_state: other_part",
    "agmerge.cli.build_horovod: "
    "'\\n'.join([*lines[-30:], *errors, f'{failure} (exit {done.returncode}; all of it: {log})'])",
    "agmerge.cli.doctor_remote: self._last_words()",
    "agmerge.cli.doctor_remote: str(error)",
    "agmerge.errors: text",
    "agmerge.options.defaults: text",
    "agmerge.runtime.call_agreement: f'{what}: {first_difference(assumed)}. {advice}'",
}
# For those who work on the library.
WITHOUT = ELSEWHERE | {
    "agmerge.backends.collective_marks: f'{name}: {code.co_name}() in {code.co_filename}, line {code.co_firstlineno}, "
    "starts a collective; let its docstring open with {MARK!r}'",
    "agmerge.cli.build_horovod: f'{file.name} of Horovod {VERSION} holds {text.count(old)} times {old!r}, not {times}'",
}


def test_codes_are_unique_and_in_a_chapter() -> None:
    codes = [problem.code for problem in catalogue()]
    assert len(codes) > 60 and len(set(codes)) == len(codes)
    assert [code for code in codes if not re.fullmatch(r"AGM[0-7]\d\d", code)] == []


def test_the_page_is_up_to_date_and_leads_somewhere() -> None:
    assert (ROOT / "docs" / "errors.md").read_text(encoding="utf-8") == page(catalogue()), "see the page's first lines"
    for problem in catalogue():
        name, _, anchor = problem.page.partition("#")
        heads = re.findall(r"^#+ (.+)$", (ROOT / "docs" / name).read_text(encoding="utf-8"), re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
        assert not anchor or anchor in slugs, problem.page


def test_every_error_and_warning_has_a_code() -> None:
    """An entry of the list that is gone, or has a code by now, is taken off it."""
    found = list(raised(sources()))
    without = {place for place, words in found if find(words) is None}
    assert len(found) > 100
    assert sorted(without - WITHOUT) == [], "give it a code in agmerge/errors/problems_*.py"
    assert sorted(WITHOUT - without) == []


def test_every_problem_can_happen() -> None:
    """A symptom that no source has is of a text that was changed."""
    trees = [tree for module, tree in sources().items() if not module.startswith("agmerge.errors.")]
    whole = "\n".join(
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    symptoms = [symptom for problem in catalogue() for symptom in problem.symptoms]
    assert [words for words in symptoms if not all(part in whole for part in words.split(UNKNOWN))] == []


def test_an_error_says_its_code_below_its_text() -> None:
    error = agmerge.RankMismatchError("density: ranks disagree on density: 0.01 on rank 0; 0.02 on rank 1")
    assert error.code == "AGM101" and str(error).endswith("rank 1")
    assert agmerge.AGMergeError("something else").code == ""
    if sys.version_info >= (3, 11):
        address = "[AGM101: python -m agmerge explain AGM101]"
        assert error.__notes__ == pickle.loads(pickle.dumps(error)).__notes__ == [address]


def test_the_command_that_an_error_prints_explains_it_without_a_network(capsys: pytest.CaptureFixture[str]) -> None:
    for problem in catalogue():
        command = address(problem).strip("[]").partition(": python -m agmerge ")[2].split()
        assert command[1] == problem.code and main(command) == 0
        told = " ".join(capsys.readouterr().out.split())
        parts = (problem.code, *problem.symptoms, problem.cause, problem.remedy, problem.page.partition("#")[0])
        assert [part for part in parts if " ".join(part.split()) not in told] == []


@pytest.mark.parametrize("asked", ["agm102", "102", "AGM102:", "[AGM102", "replicas differ, first in parameter"])
def test_a_code_may_be_copied_as_it_stands_and_words_of_an_error_do_too(
    asked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *asked.split()]) == 0
    assert capsys.readouterr().out.startswith("AGM102, steps and gradients.")


@pytest.mark.parametrize(("asked", "code"), [((), 0), (("AGM999",), 1)])
def test_without_a_code_that_is_known_all_are_listed(
    asked: tuple[str, ...], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *asked]) == code
    captured = capsys.readouterr()
    assert [problem.code for problem in catalogue() if f"  {problem.code}  " not in captured.out] == []
    assert ("'AGM999' is no code" in captured.err) is bool(asked)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("an earlier error ended this exchange: buffer 0: no answer from all ranks within 3 s", "AGM201"),
        ("an earlier error ended this exchange: who knows", "AGM124"),
        ("init(): rank 1, on host b, cannot reach rank 0 at a:1 within 3 s", "AGM202"),
        ("optimizer.step() was called between backward() and step(); call it after step()", "AGM111"),
        ("step 3: the gradient of 'w' was changed between backward() and step(). It was", "AGM103"),
        ("4 steps in a row were skipped, because gradients were not finite; in this one: w", "AGM108"),
        ("who knows", None),
    ],
)
def test_the_most_exact_problem_is_named(words: str, code: str | None) -> None:
    problem = find(words)
    assert (problem and problem.code) == code
