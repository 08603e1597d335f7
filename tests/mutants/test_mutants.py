# SPDX-License-Identifier: Apache-2.0
"""Each row of the table of mutants has text that is there once, and tests that are there; `make mutants` runs them."""

from __future__ import annotations

import re

import pytest
from mutants import run
from mutants.mutant import Mutant
from mutants.table import MUTANTS
from support.grid_cover import RUN

ROW = Mutant("a row", "agmerge/version.py", "__version__ = ", "version = ", ("tests/test_package.py",))


def test_every_row_fits_the_code() -> None:
    """Code that has moved on takes its mutant with it: see CONTRIBUTING.md."""
    assert run.check(MUTANTS) == []


def test_make_test_runs_what_every_row_names(request: pytest.FixtureRequest) -> None:
    """Of the files that were collected: in `make test` these are all."""
    run = request.config.stash[RUN]
    for row in MUTANTS:
        for test in row.tests:
            named = [runs for name, runs in run.items() if name == test or name.startswith((f"{test}::", f"{test}["))]
            assert not named or any(named), f"{row.name}: mark {test} so that `make test` runs it"


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        (Mutant("gone", ROW.file, "no such text", "", ROW.tests), "gone: its text before is 0 times in"),
        (Mutant("often", ROW.file, "e", "", ROW.tests), "give text that is there once"),
        (Mutant("moved", "agmerge/none.py", "text", "", ROW.tests), "moved: its text before is 0 times in"),
        (Mutant("no file", ROW.file, ROW.before, "", ("tests/none.py",)), "no file: there is no tests/none.py"),
        (Mutant("no test", ROW.file, ROW.before, "", ("tests/test_package.py::none",)), "there is no .*::none"),
        (Mutant("idle", ROW.file, ROW.before, "", ()), "idle: names no test that must fail"),
        (Mutant(ROW.name, ROW.file, ROW.before, "", ROW.tests), "two mutants have this name"),
    ],
    ids=lambda value: value.name if isinstance(value, Mutant) else "",
)
def test_a_row_that_does_not_fit_is_named(row: Mutant, wrong: str) -> None:
    (text,) = run.check([ROW, row])
    assert re.search(wrong, text)


def test_what_became_of_a_mutant() -> None:
    assert run.outcome(run.TESTS_FAILED, "test_of_it") == (run.DEAD, "test_of_it")
    assert run.outcome(None, "")[0] == run.outcome(-11, "")[0] == run.DEAD
    assert run.outcome(run.TESTS_PASSED, "")[0] == run.ALIVE
    assert run.outcome(run.NO_BUILD, "")[0] == run.outcome(4, "")[0] == run.LOST  # the row is wrong
