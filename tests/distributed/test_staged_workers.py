# SPDX-License-Identifier: Apache-2.0
"""Tensors of a pretended device, exchanged by real workers over MPI, Gloo, and a Horovod without NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import HERE, LAUNCHERS, launch, missing, results

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize(
    "launcher",
    [
        "torchrun",
        *(pytest.param(one, marks=pytest.mark.long) for one in LAUNCHERS if one != "torchrun"),
    ],
)
def test_tensors_of_a_device_give_the_bits_of_the_hosts(launcher: str, tmp_path: Path) -> None:
    why = missing(launcher)
    if why:
        pytest.skip(why)
    ended = launch(launcher, 2, HERE / "staged_workers.py", str(tmp_path), timeout=300)
    assert ended.code == 0, ended.output[-4000:]
    found = results(tmp_path, 2)["found"]
    for one in found:
        assert one["backend"] == LAUNCHERS[launcher][1] and one["away"] > 10
        assert all(one["equal"])
        assert one["on the device"] == one["on the host"] == found[0]["on the host"]
        assert one["own output"] == [1, 1, 1, 2, 2, 2]
        assert len(set(one["on the host"])) == 4  # it learns
        assert len(one["said"]) == 1 and "AGM703" in one["said"][0]
