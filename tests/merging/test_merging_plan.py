# SPDX-License-Identifier: Apache-2.0
"""Plan: what is a partition, what fits a model, and one spelling per plan."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merging import Plan

QUICK = settings(deadline=None)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    m, n = len(counts), sum(counts)
    dense = draw(st.lists(st.booleans(), min_size=m, max_size=m))
    labels = draw(st.lists(st.text(max_size=5), min_size=m, max_size=m))
    names = draw(st.none() | st.lists(st.text(max_size=5), min_size=n, max_size=n, unique=True))
    return Plan(tuple(counts), tuple(dense), tuple(labels), None if names is None else tuple(names))


def test_defaults_and_plain_types() -> None:
    plan = Plan((2, 1))
    assert (plan.dense, plan.labels, plan.names) == ((False, False), ("", ""), None)
    arrays: Any = (np.array([2, 1]), np.array([True, False]), ["a", "b"], ["x", "y", "z"])
    plan = Plan(*arrays)
    assert plan == Plan((2, 1), (True, False), ("a", "b"), ("x", "y", "z"))
    assert {type(value) for value in (*plan.counts, *plan.dense)} == {int, bool}
    assert hash(plan) == hash(Plan((2, 1), (True, False), ("a", "b"), ("x", "y", "z")))
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.counts = (3,)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"counts": ()}, ValueError, "counts is empty"),
        ({"counts": (2, 0)}, ValueError, r"counts\[1\] is 0.*at least 1"),
        ({"counts": (-1, 2)}, ValueError, r"counts\[0\] is -1"),
        ({"counts": (1.0,)}, TypeError, r"counts\[0\] is 1.0"),
        ({"counts": (True,)}, TypeError, r"counts\[0\] is True"),
        ({"counts": (2, 1), "dense": (True,)}, ValueError, "dense has 1 entries.*2 merge buffers.*Pass 2"),
        ({"counts": (2, 1), "dense": (True, "no")}, TypeError, r"dense\[1\] is 'no'"),
        ({"counts": (2, 1), "labels": ("a",) * 3}, ValueError, "labels has 3 entries"),
        ({"counts": (2, 1), "labels": "ab"}, TypeError, "single string 'ab'"),
        ({"counts": (2, 1), "labels": ("a", None)}, TypeError, r"labels\[1\] is None"),
        ({"counts": (2, 1), "names": ("a", "b")}, ValueError, "names has 2 entries.*of 3 tensors. Pass 3"),
        ({"counts": (2,), "names": ("a", "a")}, ValueError, r"names\[1\] repeats"),
    ],
)
def test_refuses(arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        Plan(**arguments)


@QUICK
@given(plans())
def test_bounds_walk_through_all_tensors(plan: Plan) -> None:
    covered = [tensor for start, stop in plan.bounds for tensor in range(start, stop)]
    assert covered == list(range(sum(plan.counts)))
    assert tuple(stop - start for start, stop in plan.bounds) == plan.counts


def test_check_names_the_first_difference() -> None:
    plan = Plan((2, 1), names=("a", "b", "c"))
    plan.check(3)
    plan.check(3, ["a", "b", "c"])
    Plan((2, 1)).check(3, ["x", "y", "z"])
    for wrong in (2, 4):
        with pytest.raises(ValueError, match=f"covers 3 tensors, but the model has {wrong}"):
            plan.check(wrong)
    with pytest.raises(ValueError, match="covers 3 tensors, but the model has 2"):
        Plan((2, 1)).check(3, ["x", "y"])
    with pytest.raises(ValueError, match="tensor 1 in readiness order is 'b' in the plan and 'c' in the model"):
        plan.check(3, ["a", "c", "b"])


@QUICK
@given(plans(), plans())
def test_text_and_digest_identify_a_plan(plan: Plan, other: Plan) -> None:
    assert Plan.loads(plan.dumps()) == plan and Plan.loads(plan.dumps() + "\n") == plan
    assert (plan.dumps() == other.dumps()) == (plan.digest() == other.digest()) == (plan == other)
    assert len(plan.digest()) == 16 and set(plan.digest()) <= set("0123456789abcdef")


def test_file_round_trip(tmp_path: Path) -> None:
    plan = Plan((2, 1), (True, False), ("fp16/sparse", "é"), ("a", "b", "\ud800"))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert (tmp_path / "plan.json").read_text() == plan.dumps() + "\n"


RECORDED = (
    '{"counts":[2,1],"crc32":"%s","dense":[true,false],"format":1,"kind":"merging.Plan",'
    '"labels":["int8/sparse",""],"names":["a","b","\\u00e9"]}'
)


def test_text_and_digest_are_the_recorded_ones_in_every_process() -> None:
    """A plan in somebody's checkpoint must stay readable: change these only with the format number."""
    text = RECORDED % "45e64736"
    plan = Plan((2, 1), (True, False), ("int8/sparse", ""), ("a", "b", "é"))
    assert plan.dumps() == text and plan.digest() == "900291830751fcad"
    code = f"import merging; print(merging.Plan.loads({text!r}).digest())"
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == plan.digest()
