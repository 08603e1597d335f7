"""The tiny form of every job of ``examples/train.py`` on two real workers, in one launch."""

from __future__ import annotations

import math
from typing import Any

import jobs
import pytest
from data import small
from example_jobs import RESUMED, STEPS
from launching import HERE, launch, missing, results

pytestmark = pytest.mark.timeout(400)

Found = dict[str, tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture(
    scope="module",
    params=[
        "torchrun",
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


def test_a_signal_to_one_worker_ends_both_after_the_same_step(found: Found) -> None:
    first, second = found["signal"]
    assert first["reason"] == second["reason"] == "signal" and first["step"] == second["step"]
