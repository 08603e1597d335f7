# SPDX-License-Identifier: Apache-2.0
"""``make test`` runs every part whatever the others' end, and says in one line how many tests passed and failed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import run_tests
from run_tests import NOTHING_TO_RUN, WORKERS, Count, Part, choice, parts


@pytest.fixture(autouse=True)
def own_times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the reports of these tests apart from those of the run that they are part of."""
    monkeypatch.setattr(run_tests, "TIMES", tmp_path / "times")


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def test_a(): pass\ndef test_b(): assert 0", (1, Count(1, 1))),
        ("import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip()", (0, Count(1, 0, 1))),
        ("", (NOTHING_TO_RUN, Count())),
        ("1 / 0", (2, Count(failed=1))),
        (None, (4, Count(failed=1))),  # pytest itself ends before it has written anything
    ],
)
def test_what_pytest_counts_is_counted(
    source: str | None, expected: tuple[int, Count], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "test_it.py"
    if source is not None:
        file.write_text(source)
    options = ("-q", "-p", "no:cacheprovider", "-c", str(tmp_path / "pytest.ini"))
    (tmp_path / "pytest.ini").write_text("[pytest]")
    bare = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # plugins take longer to import than these tests
    assert run_tests.run(Part("these", options, (), bare), [str(file)]) == expected
    capfd.readouterr()


@pytest.mark.parametrize("failing", [None, "unit tests", "real workers"])
def test_all_parts_run_and_one_line_sums_them_up(
    failing: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(part: Part, arguments: Sequence[str]) -> tuple[int, Count]:
        assert list(arguments) == ["-k", "this", *part.chosen]
        return (1, Count(2, 1)) if part.name == failing else (0, Count(3, 0, 1))

    monkeypatch.setattr(run_tests, "run", run)
    assert run_tests.main(["-k", "this"]) == (failing is not None)
    *_, by_part, total = capsys.readouterr().out.splitlines()
    bad, good = "2 passed, 1 failed", "3 passed, 0 failed, 1 skipped"
    names = [part.name for part in parts(everything=False)]
    assert by_part == "; ".join(f"{name}: {bad if name == failing else good}" for name in names)
    assert names[0] == "unit tests" and names[-1] == "real workers"
    assert total == "total: " + ("5 passed, 1 failed, 1 skipped" if failing else "6 passed, 0 failed, 2 skipped")


def test_the_slowest_files_are_named_by_what_all_their_tests_took(tmp_path: Path) -> None:
    cases = [("tests.test_a", 2.0), ("tests.test_b.TestOne", 1.5), ("tests.test_b", 1.0), ("tests.test_c", 0.1)]
    report = tmp_path / "unit-tests.xml"
    lines = "".join(f'<testcase classname="{name}" name="test_it" time="{time}" />' for name, time in cases)
    report.write_text(f"<testsuites><testsuite>{lines}</testsuite></testsuites>")
    found = run_tests.slowest([report, tmp_path / "of-a-part-that-did-not-run.xml"], most=2)
    assert found == [(2.5, 2, "tests.test_b"), (2.0, 1, "tests.test_a")]


def test_a_part_has_its_environment_and_keeps_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("KEPT", "2")
    given = run_tests.environment(Part("these", (), (), {"OWN": "3"}))
    assert "PYTHONDONTWRITEBYTECODE" not in given and (given["KEPT"], given["OWN"]) == ("2", "3")


def test_paths_choose_their_part() -> None:
    units, workers = parts(everything=False)
    one, other = "tests/agmerge/exchanges/test_format.py::test_x", f"{WORKERS}/test_soak.py"
    assert [choice(part, ["-x", one]) for part in (units, workers)] == [["-x", one], None]
    assert [choice(part, [one, "-x", other]) for part in (units, workers)] == [[one, "-x"], ["-x", other]]
    assert [choice(part, ["-x"]) for part in (units, workers)] == [["-x"], ["-x", WORKERS]]


@pytest.mark.parametrize(("capability", "levels"), [("AVX512", 3), ("AVX2", 2), ("DEFAULT", 2)])
def test_all_of_it_has_every_level_of_arithmetic(capability: str, levels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_tests, "capability", lambda: capability)
    first, *between, last = parts(everything=True)
    assert (first.name, last.name, len(between)) == ("unit tests", "real workers", levels)
    assert not first.environment and len({str(part.environment) for part in between}) == levels
    assert "not long" not in (*first.options, *last.options)
