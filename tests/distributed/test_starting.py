# SPDX-License-Identifier: Apache-2.0
"""How a job starts, and that ``init()`` ends at its deadline with words that help: a few workers, all at once."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from launching import HERE, ROOT, environment, reserved_port

TIMEOUT = 4.0  # seconds: AGMERGE_TIMEOUT
SLACK = 30.0  # seconds, on a busy machine
HAND = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
STEP = {  # one step of Slurm with two tasks on this machine
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}


def start(*arguments: str, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / "starting.py"), *arguments]
    given = environment(**{"AGMERGE_TIMEOUT": str(TIMEOUT), **env})
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, text=True, cwd=ROOT, env=given)  # type: ignore[call-overload,no-any-return]


def await_end(*workers: subprocess.Popen[str]) -> None:
    """Wait until one of ``workers`` has ended: the others of its job stay until their standard input ends."""
    end = time.monotonic() + 90
    while all(worker.poll() is None for worker in workers) and time.monotonic() < end:
        time.sleep(0.05)


@pytest.fixture(scope="module")
def started() -> Iterator[dict[str, dict[str, Any]]]:
    """What each worker has said, by name."""
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as silent,  # a port that never answers
        socket.socket() as first,
        socket.socket() as second,
    ):
        for waiting in (first, second):  # nobody takes them off the queue, and there is no place for another
            waiting.setblocking(False)
            waiting.connect_ex(silent.getsockname())
        srun, twice = reserved_port(), reserved_port()
        workers = {
            **{
                f"srun {rank}": start(
                    **STEP, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), MASTER_PORT=srun, AGMERGE_TIMEOUT="60"
                )
                for rank in (0, 1)
            },
            "without the other": start(**HAND, RANK="0", MASTER_PORT=reserved_port()),
            "children": start("children", **HAND, MASTER_PORT=reserved_port(), AGMERGE_TIMEOUT="60"),
            "no answer": start(**HAND, RANK="1", MASTER_PORT=str(silent.getsockname()[1])),
            **{
                name: start("stays", **HAND, RANK=name[5], MASTER_PORT=twice, AGMERGE_TIMEOUT="60")
                for name in ("rank 0", "rank 1", "rank 1 again")
            },
        }
        try:
            await_end(workers["rank 1"], workers["rank 1 again"])
            said = {name: worker.communicate(timeout=300) for name, worker in workers.items()}
        finally:
            for worker in workers.values():
                worker.kill()
        assert all(output.strip() for output, _ in said.values()), said
        yield {name: json.loads(output.splitlines()[-1]) for name, (output, _) in said.items()}


@pytest.mark.timeout(400)
def test_plain_srun_makes_one_job_and_not_a_model_for_each_task(started: dict[str, dict[str, Any]]) -> None:
    for rank in (0, 1):
        said = started[f"srun {rank}"]
        assert (said.get("place"), said.get("backend"), said.get("sum")) == ([rank, 2, rank, 2], "torch", 3.0), said


@pytest.mark.timeout(400)
def test_a_worker_that_never_comes_is_named_at_the_deadline(started: dict[str, dict[str, Any]]) -> None:
    said = started["without the other"]
    assert said["error"] == "CollectiveTimeout" and said["missing"] == [1], said
    assert said["text"].startswith("AGM203: init(): no sign of rank 1 of 2 within 4 s: it was not started")
    assert "AGMERGE_TIMEOUT sets a longer timeout" in said["text"]
    assert TIMEOUT <= said["took"] < TIMEOUT + SLACK


@pytest.mark.timeout(400)
def test_the_second_process_of_a_rank_is_told_of_the_first(started: dict[str, dict[str, Any]]) -> None:
    pair = started["rank 1"], started["rank 1 again"]
    first, second = sorted(pair, key=lambda said: "error" in said)
    assert [said.get("sum") for said in (started["rank 0"], first)] == [3.0, 3.0], (started["rank 0"], first)
    assert second["error"] == "AGMergeError" and " as rank 1: first host " in second["text"], second
    assert "MASTER_PORT" in second["text"] and "RANK" in second["text"]


@pytest.mark.timeout(400)
def test_a_port_that_never_answers_is_named_at_the_deadline(started: dict[str, dict[str, Any]]) -> None:
    said = started["no answer"]
    assert said["error"] == "CollectiveTimeout", said
    where = f"rank 1, on host {socket.gethostname()}, cannot reach rank 0 at 127.0.0.1, "
    assert said["text"].startswith(f"AGM202: init(): {where}")
    assert "(MASTER_ADDR, MASTER_PORT) within 4 s" in said["text"] and "firewall" in said["text"]
    assert said["took"] < TIMEOUT + SLACK


@pytest.mark.timeout(400)
def test_what_a_child_of_multiprocessing_raised_is_what_the_others_are_told(started: dict[str, dict[str, Any]]) -> None:
    said = started["children"]
    assert said["missing"] == [1] and "it raised FileNotFoundError: data/train.bin: no such file" in said["text"], said
