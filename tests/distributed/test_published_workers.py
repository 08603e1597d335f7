# SPDX-License-Identifier: Apache-2.0
"""A published line of OMGS-SGD on two real workers, with numbers of workers that are the launcher's, and others."""

from __future__ import annotations

from pathlib import Path

import pytest
from data import small_pictures
from launching import ROOT, torchrun

pytestmark = pytest.mark.timeout(400)

LINE = (
    "--dnn resnet20 --dataset cifar10 --max-epochs 141 --batch-size 32 --nworkers {} --data-dir {} --lr 0.1 "
    "--nsteps-update 1 --nwpernode {} --density 0.001 --compressor topk --threshold 8192 "
    "--tiny --max-steps 2 --log-dir {}"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small pictures of every kind."""
    folder = tmp_path_factory.mktemp("data")
    small_pictures.write(folder)
    return folder


@pytest.mark.parametrize(
    ("workers", "a_node", "error"),
    [
        pytest.param(2, 4, "", marks=pytest.mark.long),
        (4, 4, "--nworkers 4, and the launcher has started 2"),
        pytest.param(2, 1, "--nwpernode 1, and the launcher has started 2 of 2", marks=pytest.mark.long),
    ],
)
def test_a_published_line_says_whether_the_workers_are_there(
    workers: int, a_node: int, error: str, data: Path, tmp_path: Path
) -> None:
    line = LINE.format(workers, data, a_node, tmp_path / "log").split()
    ended = torchrun(2, ROOT / "examples" / "train.py", *line, timeout=300)
    assert (ended.code == 0) is not bool(error), ended.output[-4000:]
    assert (error or "bitwise equal") in ended.output
    assert (tmp_path / "log").exists() is not bool(error)
