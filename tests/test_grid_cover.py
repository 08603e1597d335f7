# SPDX-License-Identifier: Apache-2.0
"""A cover of a grid holds what it promises, is small, and ``make test`` runs it, or the first case of what trains."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.grid_cover import cover

HERE = Path(__file__).parent


@pytest.mark.parametrize(("sizes", "most"), [((), 0), ((5,), 5), ((2, 16), 16), ((9, 4, 2), 9), ((3, 3, 3, 3), 3)])
def test_every_value_is_in_a_cover(sizes: tuple[int, ...], most: int) -> None:
    cases = list(itertools.product(*map(range, sizes))) if sizes else []
    chosen = [cases[place] for place in cover(cases)]
    assert len(chosen) == most
    for axis, size in enumerate(sizes):
        assert {case[axis] for case in chosen} == set(range(size))
    if sizes == (2, 16):
        assert [case[0] for case in chosen].count(0) == 8  # the values of the short axis take turns


def test_what_nobody_else_holds_is_always_chosen() -> None:
    assert cover([(0, 0, 0), (0, 0, 0), (7, 7, 7)]) == [0, 2]


MARKS = ("long", "training", "unit", "values", "whole")
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
class DistributedOptimizer: pass
@pytest.mark.parametrize("d", [pytest.param(2, marks=pytest.mark.long), 3, 4])
def test_trains(d): assert DistributedOptimizer and d == 3
@pytest.mark.values
@pytest.mark.parametrize("d", [3, 4])
@pytest.mark.parametrize("c", "xy")
def test_values(c, d): assert DistributedOptimizer
def test_process():
    import subprocess
    subprocess.run(["true"], check=True)
"""


@pytest.mark.parametrize(
    ("options", "passed"),
    [
        (["-m", "not long"], 3 + 6 + 3 + 1 + 1 + 2),
        pytest.param(["--once"], 5, marks=pytest.mark.long),
        pytest.param(["-k", "x-2-2"], 1, marks=pytest.mark.long),
    ],
)
def test_how_much_is_run(options: list[str], passed: int, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(SOURCE)
    source = (HERE / "conftest.py").read_text().partition("from __future__ import annotations")[2]
    (tmp_path / "conftest.py").write_text(f"import sys; sys.path.append({str(HERE)!r})\n{source}")
    (tmp_path / "pytest.ini").write_text("\n    ".join(("[pytest]\nmarkers =", *MARKS)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(tmp_path / "pytest.ini")]
    bare = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run([*command, *options, str(tmp_path)], env=bare, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and f"{passed} passed" in done.stdout, done.stdout
    assert ("1 skipped" in done.stdout) is (options == ["--once"])
