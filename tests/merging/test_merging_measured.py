# SPDX-License-Identifier: Apache-2.0
"""Measurements: one value, the same to the bit from a file, and the same plan from it everywhere."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.planning_problems import measured

import merging
from merging import Curve, Measurements, Plan, Profile, best, predict
from merging.measured import step_end


def test_the_same_value_to_the_bit(tmp_path: Path) -> None:
    for given in (measured(), measured(sparsify=None, dense=None, modes=("dense", "dear"), facts=())):
        given.save(tmp_path / "measured.json")
        copies = Measurements.load(tmp_path / "measured.json"), Measurements.loads(given.dumps())
        for found in (*copies, pickle.loads(pickle.dumps(given))):
            assert found == given and hash(found) == hash(given) and found.dumps() == given.dumps()
            assert found.profile.backward.tobytes() == given.profile.backward.tobytes()
    assert measured().facts == (("backend", "torch"), ("compressor", "ädtopk"), ("density", "0.01"))
    assert measured(facts=reversed(measured().facts)) == measured() != measured(workers=5)
    assert measured(1) != measured(2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        measured().workers = 3  # type: ignore[misc]


def test_damage_is_seen(tmp_path: Path) -> None:
    text = measured().dumps()
    with pytest.raises(ValueError, match="damaged"):
        Measurements.loads(text.replace('"workers":4', '"workers":5'))
    with pytest.raises(ValueError, match=r"not a merging\.Measurements record"):
        Measurements.loads(Plan((2,)).dumps())
    body = {k: v for k, v in json.loads(text).items() if k not in ("crc32", "format", "kind")}
    for change in ({"workers": 0}, {"extra": 1}, {"exchange": None}, {"exchange": {"elements": [1], "seconds": []}}):
        with pytest.raises(ValueError, match="record is undamaged, but its content is"):
            Measurements.loads(merging.storage.seal("merging.Measurements", {**body, **change}))
    earlier = {k: v for k, v in body.items() if k != "message"}  # a file from before there was one
    assert Measurements.loads(merging.storage.seal("merging.Measurements", earlier)) == measured(message=None)
    del body["modes"]
    with pytest.raises(ValueError, match="record is undamaged, but its content is"):
        Measurements.loads(merging.storage.seal("merging.Measurements", body))


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"profile": 3}, TypeError, "profile is 3: expected a merging.Profile"),
        ({"exchange": None}, TypeError, "exchange is None: expected a merging.Curve"),
        ({"dense": lambda x: x}, TypeError, "dense is .*: expected a merging.Curve"),
        ({"sparsify": Curve((5,), (1.0,))}, ValueError, r"costs\.sparsify\(0\) is 1.0"),
        ({"modes": ()}, ValueError, "at least one, and each once"),
        ({"modes": ("ahead", "ahead")}, ValueError, "at least one, and each once"),
        ({"modes": "dense"}, TypeError, "single string 'dense'"),
        ({"modes": ("sideways",)}, ValueError, "mode 'sideways' is unknown"),
        ({"modes": ("dear",), "profile": Profile(["a"], [1], [0.0])}, ValueError, "Measure it, or remove the mode"),
        ({"workers": 0}, ValueError, "workers is 0"),
        ({"facts": {"a": 1}}, TypeError, r"fact \('a', 1\) is not a pair of strings"),
        ({"facts": [("a", "b"), ("a", "c")]}, ValueError, "fact 'a' appears twice"),
    ],
)
def test_refuses(changes: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        measured(**changes)


def test_costs_are_the_curves() -> None:
    given = measured()
    assert given.costs.exchange.function == given.exchange and given.costs.dense is not None
    assert measured(dense=None).costs.dense is None
    assert given.costs.message is not None and given.costs.message(10) == given.message(10)
    assert measured(message=None).costs.message is None
    assert measured(sparsify=None).costs.sparsify(np.array([0, 5])).tolist() == [0.0, 0.0]
    assert measured().costs == measured().costs


def test_best_is_the_earliest_mode_and_of_equals_the_first() -> None:
    planner = merging.get("exact")
    chosen = set()
    for seed in range(30):
        given = measured(seed)
        plan, mode = best(planner, given)
        ends = [
            predict(planner.plan(given.profile, given.costs, m), given.profile, given.costs, m).finish
            for m in given.modes
        ]
        assert predict(plan, given.profile, given.costs, mode).finish == min(ends)
        assert mode == given.modes[ends.index(min(ends))]
        chosen.add(mode)
    assert chosen == {"ahead", "behind"}
    equal = measured(sparsify=None)
    assert best(planner, equal)[1] == "ahead"
    assert best(planner, dataclasses.replace(equal, modes=("behind", "ahead")))[1] == "behind"


def test_best_with_dear_compares_whole_steps() -> None:
    """The finish of mode dear includes forward, so that of the others must."""
    profile = Profile(["a", "b"], [10, 10], [1.0, 1.0], forward=[1.0, 1.0])
    curves: dict[str, Any] = {"sparsify": None, "exchange": Curve((0, 10), (0.0, 2.0)), "dense": None, "message": None}
    given = measured(profile=profile, modes=("dense", "dear"), **curves)
    planner = merging.get("dear", bytes=0)
    # Dense: exchanges to 3 and 5, then forward. Dear: halves to 2 and 3, gathers to 4 and 5, forward from 4 on.
    plan, mode = best(planner, given)
    assert (mode, step_end(plan, given, mode)) == ("dear", 6.0)
    assert step_end(Plan((1, 1)), given, "dense") == 7.0 and predict(plan, profile, given.costs, "dense").finish == 5.0
    assert step_end(Plan((1, 1)), dataclasses.replace(given, modes=("dense",)), "dense") == 5.0
    assert best(merging.get("exact"), given)[1] == "dense"
    with pytest.raises(ValueError, match="'exact' supports the modes dense, ahead, behind.*have dear"):
        best(merging.get("exact"), dataclasses.replace(given, modes=("dear",)))


def test_best_is_the_same_in_another_process(tmp_path: Path) -> None:
    given = measured(7, n=40)
    given.save(tmp_path / "measured.json")
    code = (
        f"import sys; sys.path.insert(0, {str(Path(merging.__file__).parents[1])!r}); import merging\n"
        f"found = merging.Measurements.load({str(tmp_path / 'measured.json')!r})\n"
        "plan, mode = merging.best(merging.get('agmerge'), found); print(mode, plan.dumps())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    plan, mode = best(merging.get("agmerge"), given)
    assert done.stdout.strip() == f"{mode} {plan.dumps()}"
