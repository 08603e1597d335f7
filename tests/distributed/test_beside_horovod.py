# SPDX-License-Identifier: Apache-2.0
"""What goes wrong with Horovod's own optimizer and right with ours, by the same few lines: two workers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from launching import HERE, launch, missing, results

pytestmark = pytest.mark.timeout(400)

LAUNCHER = "horovodrun, Gloo"
FINDINGS = (
    "resume_with_weight_decay",
    "unfreeze_after_wrapping",
    "group_after_wrapping",
    "hooks_after_a_recast",
    "zero_grad_to_none",
    "bfloat16",
    "channels_last",
)
ARGUMENTS = (
    "compression none",
    "compression fp16",
    "op sum",
    "op average",
    "predivide",
    "groups by number",
    "groups listed",
    "num_groups",
    "sparse as dense",
    "process set, all",
    "process set, one",
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What both ranks found, with both optimizers."""
    why = missing(LAUNCHER)
    if why and os.environ.get("AGMERGE_TEST_ALL_LAUNCHERS") != "1":
        pytest.skip(why)
    folder: Path = tmp_path_factory.mktemp("beside")
    ended = launch(LAUNCHER, 2, HERE / "beside_horovod.py", str(folder), timeout=300)
    assert ended.code == 0, ended.output[-6000:]
    return results(folder, 2)


@pytest.mark.parametrize("finding", FINDINGS)
def test_wrong_there_and_right_here(found: dict[str, list[Any]], finding: str) -> None:
    for rank in found[finding]:
        assert rank["horovod"] > 0
        assert rank["agmerge"] == 0


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_horovods_objects_mean_what_they_mean_there(found: dict[str, list[Any]], argument: str) -> None:
    for rank in found[argument]:
        assert rank["agmerge"] == pytest.approx(rank["horovod"], abs=2e-5 if argument == "compression fp16" else 2e-6)
    first, second = found[argument]
    alone = argument == "process set, one"
    assert (first["agmerge"] != second["agmerge"]) is alone
