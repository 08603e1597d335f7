# SPDX-License-Identifier: Apache-2.0
"""A cover of a grid holds what it promises, is small, and is what ``make test`` runs of a grid."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.grid_cover import cover

HERE = Path(__file__).parent


@pytest.mark.parametrize(("sizes", "most"), [((), 0), ((5,), 5), ((2, 16), 16), ((4, 3, 2), 13), ((3, 3, 3, 3), 15)])
def test_every_pair_of_values_is_in_a_cover_and_of_two_axes_every_value(sizes: tuple[int, ...], most: int) -> None:
    cases = list(itertools.product(*map(range, sizes))) if sizes else []
    chosen = [cases[place] for place in cover(cases)]
    assert len(chosen) <= most
    together = 2 if len(sizes) > 2 else 1
    for axes in itertools.combinations(range(len(sizes)), together):
        assert {tuple(case[i] for i in axes) for case in chosen} == {tuple(case[i] for i in axes) for case in cases}
    if sizes == (2, 16):
        assert [case[0] for case in chosen].count(0) == 8  # the values of the short axis take turns


def test_what_nobody_else_holds_is_always_chosen() -> None:
    assert cover([(0, 0, 0), (0, 0, 0), (7, 7, 7)]) == [0, 2]


def test_every_value_is_in_a_cover_of_values() -> None:
    cases = list(itertools.product(range(9), range(4), range(2)))
    chosen = [cases[place] for place in cover(cases, 1)]
    assert len(chosen) == 9 and [{case[axis] for case in chosen} for axis in range(3)] == [
        *map(set, map(range, (9, 4, 2)))
    ]


SOURCE = """
import pytest
@pytest.mark.parametrize(("a", "b"), [(0, 0), (1, 1), (2, 2)])
@pytest.mark.parametrize("c", "xyz")
def test_grid(a, b, c): pass
@pytest.mark.whole
@pytest.mark.parametrize("d", [3, 4])
@pytest.mark.parametrize("c", "xyz")
def test_whole(c, d): pass
@pytest.mark.parametrize("c", "xyz")
def test_axis(c): pass
@pytest.mark.long
def test_long(): pass
def test_process():
    import subprocess
    subprocess.run(["true"], check=True)
"""


@pytest.mark.parametrize(
    ("options", "passed"),
    [
        pytest.param([], 9 + 6 + 3 + 1 + 1, marks=pytest.mark.long),
        (["-m", "not long"], 3 + 6 + 3 + 1),
        (["--once"], 3),
        pytest.param(["-k", "x-2-2"], 1, marks=pytest.mark.long),
    ],
)
def test_how_much_is_run(options: list[str], passed: int, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(SOURCE)
    source = (HERE / "conftest.py").read_text().partition("from __future__ import annotations")[2]
    (tmp_path / "conftest.py").write_text(f"import sys; sys.path.append({str(HERE)!r})\n{source}")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    long\n    thin\n    whole\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(tmp_path / "pytest.ini")]
    bare = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run([*command, *options, str(tmp_path)], env=bare, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and f"{passed} passed" in done.stdout, done.stdout
    assert ("1 skipped" in done.stdout) is (options == ["--once"])
