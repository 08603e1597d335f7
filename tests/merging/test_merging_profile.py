# SPDX-License-Identifier: Apache-2.0
"""Profile: what it refuses, that it stays as it was, and that a file gives it back to the bit."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from merging import Profile

QUICK = settings(deadline=None)

NAMES = ["fc.weight", "fc.bias", "conv.weight"]
SECONDS = st.floats(min_value=0.0, allow_nan=False, allow_infinity=False)


def make(**changes: Any) -> Profile:
    given_: dict[str, Any] = {"names": NAMES, "numel": [12, 3, 40], "backward": [0.0, 0.25, 1e-3]}
    return Profile(**{**given_, **changes})


def full() -> Profile:
    return make(forward=[1.0, 2.0, 3.0], work=[12, 0, 40], load=[1, 3, 4], noise=[0.5, 0.0, 0.75])


def test_holds_typed_arrays_and_fills_in_numel() -> None:
    profile = make()
    assert profile.names == ("fc.weight", "fc.bias", "conv.weight") and len(profile) == 3
    for array, dtype in [(profile.numel, np.int64), (profile.backward, np.float64), (profile.load, np.int64)]:
        assert array.dtype == dtype and array.shape == (3,)
    assert profile.work.tolist() == profile.load.tolist() == [12, 3, 40]
    assert profile.forward is None and profile.noise is None
    assert full().work.tolist() == [12, 0, 40] and full().load.tolist() == [1, 3, 4]
    profile = full()
    assert profile.forward is not None and profile.noise is not None
    assert profile.forward.tolist() == [1.0, 2.0, 3.0] and profile.noise.tolist() == [0.5, 0.0, 0.75]


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"numel": [1, 2]}, ValueError, r"numel has shape \(2,\) for 3 tensors.*readiness order"),
        ({"backward": [0.1] * 4}, ValueError, r"backward has shape \(4,\) for 3 tensors"),
        ({"forward": [[0.1, 0.1, 0.1]]}, ValueError, r"forward has shape \(1, 3\)"),
        ({"work": [1]}, ValueError, r"work has shape \(1,\)"),
        ({"load": []}, ValueError, r"load has shape \(0,\)"),
        ({"noise": 1.0}, ValueError, r"noise has shape \(\)"),
        ({"numel": [12, 0, 40]}, ValueError, r"numel\[1\] of tensor 'fc.bias' is 0.*at least 1"),
        ({"numel": [12, 3, -4]}, ValueError, r"numel\[2\] of tensor 'conv.weight' is -4"),
        ({"numel": [12, 3.5, 4]}, ValueError, r"numel\[1\].*3.5.*whole"),
        ({"numel": [12, float("nan"), 4]}, ValueError, r"numel\[1\].*nan.*whole"),
        ({"numel": [12, 3, 2.0**63]}, ValueError, r"numel\[2\].*below 2\*\*63"),
        ({"work": [12, -1, 4]}, ValueError, r"work\[1\].*-1.*at least 0"),
        ({"load": [-1, 1, 4]}, ValueError, r"load\[0\].*-1.*at least 0"),
        ({"backward": [0.1, -0.1, 0.1]}, ValueError, r"backward\[1\] of tensor 'fc.bias' is -0.1.*negative"),
        ({"backward": [0.1, 0.1, float("inf")]}, ValueError, r"backward\[2\].*inf.*finite"),
        ({"forward": [float("nan"), 0.1, 0.1]}, ValueError, r"forward\[0\].*nan.*finite"),
        ({"noise": [0.1, 0.1, -2.0]}, ValueError, r"noise\[2\].*negative"),
        ({"names": ["a", "b", "a"]}, ValueError, r"names\[2\] repeats names\[0\] \('a'\)"),
        ({"names": []}, ValueError, "names is empty"),
        ({"names": "abc"}, TypeError, "single string 'abc'"),
        ({"names": ["a", 1, "b"]}, TypeError, r"names\[1\] is 1"),
        ({"numel": ["1", "2", "3"]}, TypeError, "numel holds"),
        ({"numel": [True, True, True]}, TypeError, "numel holds bool"),
        ({"backward": [None, 1.0, 1.0]}, TypeError, "backward holds object"),
    ],
)
def test_refuses(changes: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make(**changes)


def test_is_read_only_and_owns_its_arrays() -> None:
    numel = np.array([12, 3, 40])
    profile = make(numel=numel)
    numel[0] = 7
    assert profile.numel.tolist() == profile.work.tolist() == [12, 3, 40]
    with pytest.raises(dataclasses.FrozenInstanceError):
        profile.numel = numel  # type: ignore[misc]
    for copied in (profile, copy.deepcopy(profile), pickle.loads(pickle.dumps(profile))):
        assert copied == profile
        for array in (copied.numel, copied.backward, copied.work, copied.load):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1


@pytest.mark.parametrize(
    "changes",
    [
        {"names": ["a", "b", "c"]},
        {"numel": [12, 3, 41], "work": [12, 3, 40], "load": [12, 3, 40]},
        {"backward": [0.0, 0.25, 1.1e-3]},
        {"forward": [0.0, 0.0, 0.0]},
        {"work": [12, 0, 40]},
        {"load": [12, 0, 40]},
        {"noise": [0.0, 0.0, 0.0]},
    ],
)
def test_equal_by_value(changes: dict[str, Any]) -> None:
    assert make() == make(work=[12, 3, 40]) and hash(make()) == hash(make(work=[12, 3, 40]))
    assert make(**changes) != make() and make(**changes) == make(**changes)
    assert dataclasses.replace(make(), **changes) == make(**changes)
    assert make() != "profile"


@settings(QUICK, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.text(), st.integers(1, 2**62), SECONDS, SECONDS), min_size=1, unique_by=lambda t: t[0]))
def test_file_gives_back_every_bit(tmp_path: Path, tensors: list[tuple[str, int, float, float]]) -> None:
    names, numel, backward, noise = zip(*tensors, strict=True)
    profile = Profile(names, numel, backward, noise=noise)
    profile.save(tmp_path / "profile.json")
    again = Profile.read(tmp_path / "profile.json")
    assert again == profile and again.backward.tobytes() == profile.backward.tobytes()
    assert again.noise is not None and profile.noise is not None
    assert again.noise.tobytes() == profile.noise.tobytes()


def test_file_keeps_optional_fields(tmp_path: Path) -> None:
    for profile in (make(), full()):
        profile.save(tmp_path / "profile.json")
        assert Profile.read(tmp_path / "profile.json") == profile


def test_repr_is_short() -> None:
    assert repr(make()) == "<Profile: 3 tensors, 55 elements, backward 0.251 s>"
