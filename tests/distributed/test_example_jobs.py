# SPDX-License-Identifier: Apache-2.0
"""The tiny form of every job of ``examples/train.py`` on two real workers, in one launch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jobs
import pytest
from data import small
from example_jobs import RESUMED, STEPS
from launching import HERE, ROOT, launch, missing, results

pytestmark = pytest.mark.timeout(400)

Found = dict[str, tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("torchrun", marks=pytest.mark.long),
        pytest.param("horovodrun, Gloo", marks=pytest.mark.long),
        pytest.param("mpirun", marks=pytest.mark.long),
    ],
)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What both ranks saw of every job."""
    why = missing(request.param)
    if why:
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("jobs")
    small.write(folder / "data")
    ended = launch(request.param, 2, HERE / "example_jobs.py", str(folder), timeout=380)
    assert ended.code == 0, ended.output[-6000:]
    first, second = results(folder, 2)["jobs"]
    return {name: (first[name], second[name]) for name in first}


def test_every_job_trains_and_replicas_are_equal(found: Found) -> None:
    for job in jobs.JOBS:
        for rank in found[job]:
            assert rank["replicas_equal"] and rank["step"] == STEPS and rank["bytes_sent"] > 0, job
            metrics = [rank[key] for key in ("loss", "perplexity", "accuracy", "f1") if key in rank]
            assert metrics and all(map(math.isfinite, metrics)), job


def test_runs_go_on_to_the_bit(found: Found) -> None:
    for job in RESUMED:
        for rank in found[f"{job}, resumed"]:
            assert rank["again"] == rank["straight"], job


def test_a_worker_with_fewer_pictures_joins_the_other(found: Found) -> None:
    for rank in found["uneven"]:  # 719 and 718 pictures
        assert rank["step"] == 3 and rank["reason"] == "done" and rank["replicas_equal"]


def test_a_signal_to_one_worker_ends_both_after_the_same_step(found: Found) -> None:
    first, second = found["signal"]
    assert first["reason"] == second["reason"] == "signal" and first["step"] == second["step"]


# -- what is published of them: that they learn ----------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small data of every kind."""
    folder = tmp_path_factory.mktemp("data")
    small.write(folder)
    return folder


def trained(launcher: str, line: str, data: Path, folder: Path) -> dict[str, Any]:
    """What two workers' run of ``train.py`` came to."""
    if why := missing(launcher):
        pytest.skip(why)
    where = f"--data {data} --log-dir {folder} --json {folder / 'out.json'}"
    ended = launch(launcher, 2, ROOT / "examples" / "train.py", *f"{line} {where}".split(), timeout=360)
    assert ended.code == 0, ended.output[-6000:]
    return json.loads((folder / "out.json").read_text())


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["torchrun", "horovodrun, Gloo", "mpirun"])
def test_resnet20_gets_to_90_percent_with_a_hundredth_of_its_gradients(
    launcher: str, data: Path, tmp_path: Path
) -> None:
    line = "resnet20-cifar10 --compression topk --density 0.01 --epochs 40 --target 0.9 --stop-at-target"
    found = trained(launcher, line, data, tmp_path)
    assert found["reason"] == "target" and found["accuracy"] >= 0.9 and found["replicas_equal"]
    assert found["bytes_sent"] < found["bytes_dense"] / 30


@pytest.mark.long
@pytest.mark.parametrize(
    "job, metric, low, high",
    [
        ("lstm-wikitext2", "perplexity", 20, 120),  # unigrams have 209
        ("gpt2-wikitext2", "perplexity", 5, 16),  # 24
        ("bert-base-squad", "f1", 0.4, 1.0),  # a random word has 0.06
    ],
)
def test_text_is_learnt_far_beyond_chance(
    job: str, metric: str, low: float, high: float, data: Path, tmp_path: Path
) -> None:
    found = trained("torchrun", f"{job} --tiny --compression adtopk --density 0.05", data, tmp_path)
    assert low < found[metric] < high and found["replicas_equal"]
