# SPDX-License-Identifier: Apache-2.0
"""A process that was forked after ``init()``: a lone parent's finds the other workers, a rank's is no worker."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from typing import Any

import pytest

SCRIPT = """
import json, os, sys
import torch, agmerge

torch.set_num_threads(1)
model = torch.nn.Linear(64, 64)

def wrapped():
    return agmerge.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())

def step(seed):
    optimizer.zero_grad()
    model(torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
    optimizer.step()

def error(call, *given):
    try:
        call(*given)
    except agmerge.AGMergeError as raised:
        return str(raised)
    return ""

def forked(body):
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            os.write(writing, json.dumps(body()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    file = os.fdopen(reading)
    return lambda: json.loads(file.read())

def numbers():
    return agmerge.rank(), agmerge.size(), agmerge.is_initialized()

def of_a_rank():
    refused = [error(step, 9), error(agmerge.barrier), error(agmerge.init), error(wrapped)]
    return {"numbers": numbers(), "refused": refused}

def of_a_lone_one(rank):
    found = {"before": numbers(), "refused": [error(step, 9), error(agmerge.barrier)]}
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
    agmerge.init()
    for seed in range(3):
        step(2 * seed + rank)
        if seed == 0:
            found["fork"] = forked(of_a_rank)()
    return {**found, "after": numbers(), "sum": float(model.weight.detach().double().sum())}

agmerge.init()
optimizer = wrapped()
step(9)
ends = [forked(lambda rank=rank: of_a_lone_one(rank)) for rank in range(2)]
print(json.dumps([end() for end in ends]))
"""


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """Return what two forks of a lone process have found, and forks of these, which are ranks by then."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ended = subprocess.run([sys.executable, "-c", SCRIPT, port], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr[-3000:]
    ranks: list[dict[str, Any]] = json.loads(ended.stdout)
    return ranks


def test_forks_of_a_lone_process_find_each_other(found: list[dict[str, Any]]) -> None:
    assert [one["after"] for one in found] == [[0, 2, True], [1, 2, True]]
    assert found[0]["sum"] == found[1]["sum"]


def test_before_init_a_fork_may_not_go_on_alone(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["before"] == [0, 1, False]
        assert all(
            "This process was forked from one that called" in text and "init()" in text for text in one["refused"]
        )


def test_a_fork_of_a_rank_has_its_numbers_and_no_place_among_the_workers(found: list[dict[str, Any]]) -> None:
    """The workers of a DataLoader are forks, and ask for the rank."""
    for rank, one in enumerate(found):
        assert one["fork"]["numbers"] == [rank, 2, True]
        assert len(one["fork"]["refused"]) == 4
        assert all(f"was forked from rank {rank} of 2" in text for text in one["fork"]["refused"])
