# SPDX-License-Identifier: Apache-2.0
"""Jobs over two hosts of a real Slurm: plain ``srun``, ``srun torchrun``, and what ``launch.py`` submits."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import slurm_hosts
import two_hosts
from launching import HERE, ROOT, Ended
from two_hosts import Hosts

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

SCRIPT = str(HERE / "on_hosts.py")
PYTHON = sys.executable
LIMIT = 120  # seconds for a job


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Two nodes, whose own names lead to 127.0.1.1."""
    if why := two_hosts.usable() or slurm_hosts.usable():
        pytest.skip(f"no Slurm on this machine: {why}")
    with Hosts(2, own="127.0.1.1") as both:
        slurm_hosts.start(both, tmp_path_factory.mktemp("slurm"))
        yield both


def workers(ended: Ended) -> list[dict[str, Any]]:
    """What the workers of a step have said, by rank."""
    assert ended.code == 0, ended.output
    said = [json.loads(line) for line in ended.output.splitlines() if line.startswith("{")]
    assert len({one["digest"] for one in said}) == 1 and all(one["backend"] == "torch" for one in said)
    return sorted(said, key=lambda one: one["place"])


def test_tasks_of_plain_srun_are_one_job(hosts: Hosts) -> None:
    said = workers(hosts.run(0, ["srun", "-N", "2", "-n", "4", "--overcommit", PYTHON, SCRIPT], LIMIT))
    assert [one["place"] for one in said] == [[0, 4, 0, 2], [1, 4, 1, 2], [2, 4, 0, 2], [3, 4, 1, 2]]
    assert [one["host"] for one in said] == ["node0", "node0", "node1", "node1"]


def test_srun_of_torchrun(hosts: Hosts) -> None:
    meeting = "--rdzv_backend c10d --rdzv_id $SLURM_JOB_ID --rdzv_endpoint node0:29500"
    run = f"{PYTHON} -m torch.distributed.run --nnodes $SLURM_NNODES --nproc_per_node 1 {meeting} {SCRIPT}"
    said = workers(hosts.run(0, ["srun", "-N", "2", "--ntasks-per-node=1", "sh", "-c", run], LIMIT))
    assert [one["place"] for one in said] == [[0, 2, 0, 1], [1, 2, 0, 1]]


def test_tasks_with_slurms_pmi_and_an_mpi_that_does_not_speak_it_are_no_job_and_are_told_what_to_do(
    hosts: Hosts,
) -> None:
    run = ["srun", "--mpi=pmi2", "-N", "2", "-n", "2", PYTHON, SCRIPT]
    refused = hosts.run(0, run, LIMIT)
    if refused.code:  # some MPIs do speak it, and where there is none torch takes the tasks
        assert "backend sees one" in refused.output and "Under srun, set AGMERGE_BACKEND=torch" in refused.output
    said = workers(hosts.run(0, run, LIMIT, AGMERGE_BACKEND="torch"))
    assert [one["place"] for one in said] == [[0, 2, 0, 1], [1, 2, 0, 1]]


def test_what_the_launcher_of_the_examples_submits(hosts: Hosts, tmp_path: Path) -> None:
    settings = ['hosts = ["node0:1", "node1:1"]', f'python = "{PYTHON}"', 'interface = "net0"']
    settings += ["[environment]", f'PYTHONPATH = "{ROOT}"', "[slurm]", f'chdir = "{tmp_path}"']
    (tmp_path / "cluster.toml").write_text("\n".join([*settings, ""]))
    given = ["--config", str(tmp_path / "cluster.toml"), "--launcher", "slurm", "--sbatch", str(tmp_path / "job.sh")]
    train = [str(ROOT / "examples" / "train.py"), "digits", "--max-steps", "6", "--compression", "topk"]
    submitted = hosts.run(0, [PYTHON, "examples/launch.py", *given, "--", *train, "--log-dir", "runs"], LIMIT)
    assert submitted.code == 0 and "Submitted batch job" in submitted.output, submitted.output
    end = time.monotonic() + LIMIT
    while hosts.run(0, ["squeue", "-h"], 20).output.strip() and time.monotonic() < end:
        time.sleep(0.5)
    printed = "".join(file.read_text() for file in tmp_path.glob("*.out"))
    assert "2 (torch backend)" in printed and "bitwise equal" in printed, printed
    (log,) = (tmp_path / "runs").glob("*/log.jsonl")
    assert json.loads(log.read_text().splitlines()[-1])["replicas_equal"] is True
