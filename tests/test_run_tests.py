# SPDX-License-Identifier: Apache-2.0
"""``make test`` runs every part whatever the others' end, files side by side, and one line says how many passed."""

from __future__ import annotations

import os
import subprocess
import sys
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
    monkeypatch.setattr(run_tests, "capability", lambda: "AVX2")
    assert run_tests.main(["--all", "-k", "this"]) == (failing is not None)
    *_, by_part, total = capsys.readouterr().out.splitlines()
    bad, good = "2 passed, 1 failed", "3 passed, 0 failed, 1 skipped"
    names = [part.name for part in parts(everything=True)]
    assert by_part == "; ".join(f"{name}: {bad if name == failing else good}" for name in names)
    assert names[0] == "unit tests" and names[-1] == "real workers" and len(names) == 4
    assert total == "total: " + ("11 passed, 1 failed, 3 skipped" if failing else "12 passed, 0 failed, 4 skipped")


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
    (short,) = parts(everything=False)
    units, *_, workers = parts(everything=True)
    one, other = "tests/agmerge/exchanges/test_format.py::test_x", f"{WORKERS}/test_soak.py"
    assert [choice(part, ["-x", one]) for part in (short, units, workers)] == [["-x", one], ["-x", one], None]
    assert [choice(part, [one, "-x", other]) for part in (short, units, workers)] == [
        [one, "-x", other],
        [one, "-x"],
        ["-x", other],
    ]
    assert [choice(part, ["-x"]) for part in (short, units, workers)] == [["-x"], ["-x"], ["-x", WORKERS]]


FILES = {
    "test_a.py": "import os, time\nimport pytest\n"
    "def test_one(tmp_path): assert tmp_path.name == 'test_one0'\n"
    "@pytest.mark.parametrize('x', [1, 2, 3])\ndef test_three(x): assert x < 3\n",
    "test_b.py": "import os, signal\ndef test_dies(): os.kill(os.getpid(), signal.SIGKILL)\ndef test_lost(): pass\n",
    **{f"test_{name}.py": "import os\ndef test_it(): pass\n" for name in "cdefg"},
}


@pytest.mark.parametrize("once", [False, True])
def test_files_run_side_by_side_and_none_is_lost(once: bool, tmp_path: Path) -> None:
    """Though a process dies: its test has failed, and another process takes the files that are left."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]")
    (tmp_path / "conftest.py").write_text(
        "from side_by_side import SideBySide\n"
        "def pytest_configure(config): config.pluginmanager.register(SideBySide(config, 2))\n"
    )
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", str(tmp_path)]
    paths = {"PYTHONPATH": str(Path(run_tests.__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ended = subprocess.run(
        [*command, *(["-x"] if once else [])], env={**os.environ, **paths}, cwd=tmp_path, capture_output=True, text=True
    )
    assert ended.returncode == (2 if once else 1), ended.stdout + ended.stderr
    found = run_tests.counted(1, report)
    assert found == Count(8, 2) or once and found.failed == 1
    assert once or "The process of this test has died" in ended.stdout and "assert 3 < 3" in ended.stdout


@pytest.mark.parametrize(("capability", "levels"), [("AVX512", 3), ("AVX2", 2), ("DEFAULT", 2)])
def test_all_of_it_has_every_level_of_arithmetic(capability: str, levels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_tests, "capability", lambda: capability)
    first, *between, last = parts(everything=True)
    assert (first.name, last.name, len(between)) == ("unit tests", "real workers", levels)
    assert not first.environment and len({str(part.environment) for part in between}) == levels
    assert "not long" not in (*first.options, *last.options)
