# SPDX-License-Identifier: Apache-2.0
"""Which tests are marked ``unit``, and which ``training``."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.kind_of_test import kind_of

SOURCE = """
import subprocess
import agmerge
from support import mlp, wrap

START = lambda: subprocess.run(["true"])
CASES = {"a": lambda: agmerge.DistributedOptimizer}

@pytest.fixture
def optimizer():
    return wrap(mlp())

def made():
    return later()

def later():
    def body(rank):
        return wrap(mlp())
    return body

def test_plain(tmp_path): assert mlp()
def test_direct(): agmerge.DistributedOptimizer(None)
def test_through_a_helper(): wrap(mlp())
def test_through_two_of_its_own(): made()
def test_by_fixture(optimizer): pass
@pytest.mark.parametrize("case", CASES)
def test_by_parameter(case): pass
def test_process(): subprocess.run([])
def test_later_process(): START()
def test_both(): START(); made()
class TestInAClass:
    def test(self): made()
"""


@pytest.mark.parametrize(
    "test, kind",
    [
        ("test_plain", "unit"),
        ("test_direct", "training"),
        ("test_through_a_helper", "training"),
        ("test_through_two_of_its_own", "training"),
        ("test_by_fixture", "training"),
        ("test_by_parameter", "training"),
        ("test_process", None),
        ("test_later_process", None),
        ("test_both", "training"),
        ("TestInAClass", "training"),
    ],
)
def test_what_a_test_reaches_says_what_it_is(tmp_path: Path, test: str, kind: str | None) -> None:
    path = tmp_path / "test_it.py"
    path.write_text(SOURCE)
    assert kind_of(path, test) == kind


def test_marks_are_set(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("unit") is not None
