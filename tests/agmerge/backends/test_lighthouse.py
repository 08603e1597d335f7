# SPDX-License-Identifier: Apache-2.0
"""A lighthouse that says nothing, or what cannot be read: every wait ends, and the job goes on."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_membership_hostile import GARBAGE, KEYS

import agmerge
from agmerge.backends import generations, lighthouse
from agmerge.backends.generations import NEWCOMERS, Elastic, Generations
from agmerge.backends.job_store import JobStore
from agmerge.backends.lighthouse import BoundedStore

WAIT = 30.0


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Store of a lighthouse in this process, ready at once."""
    monkeypatch.setattr(lighthouse, "SETTLES", 0.0)
    return generations.serve(0)


@pytest.fixture
def silent() -> Iterator[int]:
    """Port at which connections are accepted, by the system, and nothing is said."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def until(what: Callable[[], bool]) -> None:
    """Wait until ``what()`` is true."""
    end = time.monotonic() + WAIT
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_port_that_accepts_and_says_nothing_is_no_lighthouse(silent: int) -> None:
    begun = time.monotonic()
    with pytest.raises(
        agmerge.AGMergeError, match=f"port {silent}, within 0.5 s .a process accepts connections at this address"
    ):
        agmerge.init(elastic=Elastic(lighthouse=f"127.0.0.1:{silent}", patience=0.5))
    assert time.monotonic() - begun < WAIT


def test_a_call_without_an_answer_ends_and_so_do_all_later_ones() -> None:
    answers, asked = threading.Event(), []

    class Stuck:
        def add(self, key: str, amount: int) -> int:
            asked.append(key)
            answers.wait(WAIT)
            return amount

        def set(self, key: str, value: str) -> None:
            asked.append(key)

    store = BoundedStore(Stuck, WAIT, answer=0.2)
    store.set("first", "")
    for key in ("second", "third"):
        with pytest.raises(RuntimeError, match="a process accepts connections at this address"):
            store.add(key, 1)
    assert asked == ["first", "second"]
    answers.set()


def test_an_error_of_the_store_is_the_callers() -> None:
    store = BoundedStore(lambda: dist.HashStore(), WAIT)
    store.set("count", "garbage")
    with pytest.raises(ValueError, match="stoll"):
        store.add("count", 1)
    assert store.compare_set("count", "garbage", "1") == b"1" and store.add("count", 1) == 2

    def fails() -> Any:
        raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        BoundedStore(fails, WAIT)


@pytest.mark.timeout(120)
def test_a_job_goes_on_whatever_others_write_and_lets_in_who_comes(served: Any) -> None:
    """Two workers over Gloo, garbage in all records, connections that say nothing or half a word; a third one comes."""
    options = Elastic(lighthouse=f"127.0.0.1:{served.port}", patience=WAIT, suspect=WAIT)
    with ExitStack() as held, ThreadPoolExecutor(3) as threads:
        first, second = threads.map(lambda _: Generations(options, WAIT), range(2))
        jobs = [first, second]
        for job in jobs:
            held.callback(job.close)
        first.announce_begun()
        for port in (served.port, first._server.port, second._server.port):
            for said in (b"", b"\x07", b"GET / HTTP/1.1\r\n\r\n"):
                connection = held.enter_context(socket.create_connection(("127.0.0.1", port)))
                connection.sendall(said)
        for garbage in GARBAGE.values():
            for key in (*KEYS, "broken/1"):
                served.set(key, garbage)
            time.sleep(generations.BEAT)  # they look while it is there; what they find does not depend on when
        until(lambda: all(job.group.generation.number == 2 for job in jobs))  # "garbage" may be why one gave it up
        assert all(thread.is_alive() for job in jobs for thread in job._threads)
        third = threads.submit(Generations, options, WAIT)
        until(lambda: all(job.newcomers_wait for job in jobs))
        groups = list(threads.map(lambda job: job.after(job.group.backend, NEWCOMERS), jobs))
        held.callback(third.result(WAIT).close)
        groups.append(third.result().group)
        assert [len(group.generation.members) for group in groups] == [3] * 3
        assert [group.generation.lost_steps for group in groups] == [None] * 3

        def total(group: generations.Group) -> float:
            tensor = torch.ones(1)
            group.backend.all_reduce(tensor, "sum").wait(WAIT)
            return tensor.item()

        assert list(threads.map(total, groups)) == [3.0] * 3
        assert any(JobStore(served).has_begun(one.number) for one in groups[0].generation.members)
