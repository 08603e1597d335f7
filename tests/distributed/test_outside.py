# SPDX-License-Identifier: Apache-2.0
"""Strangers at the ports of two real workers, a worker that is stopped for a while, and workers with too few files."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from launching import HERE, ROOT, environment, reserved_port

TIMEOUT = 5.0  # seconds: AGMERGE_TIMEOUT; more than the shortest stop that a rank notices
PATIENCE = 60.0  # seconds, on a busy machine
DEEP = b"[" * 1001 + b"\n"


class Worker:
    """A worker under way, of which each line is read when it has come."""

    def __init__(self, rank: int, port: str, **more: str) -> None:
        env = environment(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **more)
        script = [sys.executable, str(HERE / "outside.py")]
        self.process = subprocess.Popen(
            script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=ROOT
        )
        self._end = threading.Timer(4 * PATIENCE, self.process.kill)
        self._end.start()

    def says(self) -> dict[str, Any]:
        """The next line that it prints."""
        assert self.process.stdout is not None
        said: dict[str, Any] = json.loads(self.process.stdout.readline())
        return said

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self._end.cancel()
        self.process.kill()
        self.process.communicate()


def readable(port: int) -> str:
    """All that a stranger can read in the store at ``port``."""
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=PATIENCE), wait_for_workers=False)
    return "; ".join(f"{key} = {store.get(key)!r}" for key in store.list_keys())


@pytest.fixture(scope="module")
def outcome() -> Iterator[dict[str, Any]]:
    """What a stranger could read and do, and what each worker said when rank 1 had been stopped."""
    port, strangers = reserved_port(), []
    workers = [Worker(rank, port, AGMERGE_TIMEOUT=str(TIMEOUT)) for rank in (0, 1)]
    try:
        places = [worker.says() for worker in workers]
        read = readable(int(port))
        for place in places:
            strangers += [socket.create_connection(("127.0.0.1", place["port"]), PATIENCE) for _ in range(30)]
            strangers[-1].sendall(DEEP)
        workers[1].process.send_signal(signal.SIGSTOP)
        workers[0].go_on()
        errors = [workers[0].says()["error"]]
        workers[1].process.send_signal(signal.SIGCONT)
        workers[1].go_on()
        errors.append(workers[1].says()["error"])
        yield {"errors": errors, "tokens": places[0]["tokens"], "read": read}
    finally:
        for worker in workers:
            worker.end()
        for stranger in strangers:
            stranger.close()


@pytest.mark.timeout(400)
def test_a_stranger_reads_no_token_in_the_store(outcome: dict[str, Any]) -> None:
    assert len(set(outcome["tokens"])) == 2
    assert not any(token in outcome["read"] for token in outcome["tokens"]), outcome["read"]


@pytest.mark.timeout(400)
def test_a_rank_that_is_stopped_is_told_from_others_that_do_not_answer(outcome: dict[str, Any]) -> None:
    error = outcome["errors"][0]
    assert "Missing: rank 1 " in error and "its process does not answer: it is stopped" in error


@pytest.mark.timeout(400)
def test_a_rank_that_was_stopped_itself_says_so(outcome: dict[str, Any]) -> None:
    """And strangers, who were there all the time, have not kept it from asking the other."""
    error = outcome["errors"][1]
    assert "This process did not run for " in error and "s: it was stopped (SIGSTOP, a debugger" in error
    assert "Waiting too: rank 0 " in error and "it has given up waiting for agreement (second)" in error
    assert "No rank is missing" not in error


@pytest.mark.long
@pytest.mark.timeout(400)
def test_too_few_open_files_are_said_to_be_the_reason() -> None:
    port = reserved_port()
    command = ["sh", "-c", f"ulimit -n 20; exec '{sys.executable}' '{HERE / 'starting.py'}'"]
    given = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "AGMERGE_TIMEOUT": "30"}
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment(RANK=rank, **given))
        for rank in "01"
    ]
    try:
        said = [json.loads(worker.communicate(timeout=2 * PATIENCE)[0].splitlines()[-1]) for worker in started]
    finally:
        for worker in started:
            worker.kill()
    for one in said:
        assert "limit is 20 (ulimit -n), which is not enough to connect 2 ranks. Raise the limit" in one["text"], said
        assert "the network or the backend is stuck" not in one["text"]
