# SPDX-License-Identifier: Apache-2.0
"""Membership of an elastic job where others write to its store, and where its lighthouse is started again."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from test_membership import Job, numbers

from agmerge.backends.job_store import JobStore, Worker
from agmerge.backends.membership import GOES, HURRY, SILENT, Generation, Membership
from agmerge.errors import AGMergeError, TooFewWorkers
from agmerge.version import __version__

GARBAGE = {
    "bytes": b"\xff\x00\xfe",
    "empty": "",
    "text": "garbage",
    "huge": "9" * 30,
    "negative": "-1",
    "list": "[]",
    "strangers": "[77, 78]",
    "nested": "[" * 5000,
    "object": '{"number": 1}',
}
KEYS = (
    *("workers", "generation", "worker/1", "worker/2", "members/1", "members/2", "members/3", "beat/1", "beat/2"),
    *("left/1", "left/2", "begun/1", "begun/3", "asks/2/1", "refused/1", "refused/3"),
)


class Slow:
    """Store at the other end of a network: an answer takes a while, in which others write."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._inner, name)

        def late(*given: Any) -> Any:
            found = call(*given)
            time.sleep(0.001)
            return found

        return late


def at_once(calls: list[Callable[[], Any]]) -> None:
    """Make all calls, each on a thread."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)


def asking(workers: list[Membership], before: list[Generation], new: list[Membership]) -> list[Any]:
    """Return the calls by which workers form their next generation, with newcomers."""
    asks = [partial(one.next, its, 60.0, lets_in=True) for one, its in zip(workers, before, strict=True)]
    return [*asks, *(partial(one.next, None, 60.0, lets_in=False) for one in new)]


def test_workers_that_come_back_to_a_lighthouse_at_once_make_no_newcomers() -> None:
    """All of them raise its counter to what they know, not beyond it: twenty restarts, four workers."""
    job = Job()
    before = job.first(4)
    job.workers[0].begin()
    for _ in range(20):
        store: Any = Slow(dist.HashStore())
        at_once([partial(one.reconnect, store, its) for one, its in zip(job.workers, before, strict=True)])
        assert store.add("workers", 0) == 4
        for one in job.workers:
            one.beat()
        assert not any(one.newcomers_wait() for one in job.workers)
        assert JobStore(store).has_begun(1), "else newcomers would begin anew while it lives"
        assert not JobStore(store).has_begun(2)
    job.store = store
    [new] = job.arrive()
    found = job.together(asking(job.workers[:4], before, [new]), job.workers)
    assert [numbers(one) for one in found] == [[1, 2, 3, 4, 5]] * 5


def test_a_number_without_a_record_is_no_newcomer() -> None:
    job = Job()
    job.first(2)
    job.store.add("workers", 3)
    job.store.add("beat/4", 1)
    assert not job.workers[0].newcomers_wait()


def test_newcomers_do_not_begin_anew_at_a_lighthouse_that_was_started_again() -> None:
    """The worker that has the state is silent for a moment, just after it has come back."""
    job = Job()
    [old] = job.first(1)
    job.workers[0].begin()
    job.store = dist.HashStore()
    job.workers[0].reconnect(job.store, old)
    [new] = job.arrive()
    now = job.together(asking(job.workers[:1], [old], [new]), job.workers)
    started = job.clock.seconds

    def later() -> Generation:
        while job.clock.seconds < started + 3 * HURRY:
            time.sleep(0.001)
        return job.workers[0].next(now[0], 60.0, lets_in=False)

    found = job.together([lambda: new.next(now[1], 60.0, lets_in=False), later], [new])
    assert [numbers(one) for one in found] == [[1, 2]] * 2


def test_a_worker_that_is_suspect_is_asked_no_more() -> None:
    """To ask takes a second where nothing answers, and the answer would not count."""
    job = Job()
    first, second = job.arrive(2)
    asked: list[int] = []
    job.answering = {second.own.number}
    first._answers = lambda worker: asked.append(worker.number) or True  # type: ignore[func-returns-value]
    while not first.is_lost(second.own.number):
        job.clock.seconds += HURRY / 2
    so_far = len(asked)
    assert so_far > 0
    for _ in range(10):
        job.clock.seconds += HURRY / 2
        assert first.is_lost(second.own.number)
    assert len(asked) == so_far


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_garbage_in_every_record_ends_no_job_and_begins_no_second_one(garbage: Any) -> None:
    """Its workers write again what newcomers need, and what none can read counts as missing."""
    job = Job()
    before = job.first(2)
    job.workers[0].begin()
    for key in KEYS:
        job.store.set(key, garbage)
    job.clock.seconds += HURRY
    for one in job.workers:
        one.beat()
        one.restore(before[0])
        assert not one.newcomers_wait() and not one.is_lost(1) and not one.is_lost(2)
    [new] = job.arrive()
    assert new.own.number >= 3
    found = job.together(asking(job.workers[:2], before, [new]), job.workers)
    assert [numbers(one) for one in found] == [[1, 2, new.own.number]] * 3
    assert [one.lost_steps for one in found] == [None] * 3


def test_garbage_that_comes_between_is_no_decision() -> None:
    """A newcomer goes on from the last decision that can be read; it does not begin by itself."""
    job = Job()
    now = job.first(2)
    job.workers[0].begin()
    for _ in range(3):
        asks = [partial(one.next, its, 60.0, lets_in=False) for one, its in zip(job.workers, now, strict=True)]
        now = job.together(asks, job.workers)
    for number in (1, 2, 3):
        job.store.set(f"members/{number}", b"\xff")
    job.clock.seconds += HURRY
    job.workers[0].restore(now[0])
    [new] = job.arrive()
    found = job.together(asking(job.workers[:2], now, [new]), job.workers)
    assert [(numbers(one), one.number) for one in found] == [([1, 2, 3], 5)] * 3


RECORDS: dict[str, Any] = {
    "one field more": {"more": 1},
    "another version": {"version": "9.9"},
    "another version's format": {"version": "9.9", "more": 1},
    "a port that is a text": {"port": "x"},
    "a port without bounds": {"port": 1 << 40},
    "an address with a null": {"address": "a\0b"},
    "a name without end": {"host": "h" * 10**5},
    "another number": {"number": 1},
    "a list": None,
}


@pytest.mark.parametrize("what", RECORDS)
def test_a_newcomer_with_a_record_that_cannot_be_read_is_refused_by_name(what: str) -> None:
    job, told = Job(), []
    before = job.first(2)
    for one in job.workers:
        one._tell = told.append
    [stranger] = job.arrive()
    record = asdict(stranger.own)
    more = RECORDS[what]
    job.store.set("worker/3", json.dumps([1, 2] if more is None else {**record, **more}))
    [new] = job.arrive()
    assert job.workers[0].newcomers_wait()
    found = job.together(asking(job.workers[:2], before, [new]), job.workers)
    assert [numbers(one) for one in found] == [[1, 2, 4]] * 3
    assert len(told) == 1 and told[0].startswith("worker 3 cannot join: it") and __version__ in told[0]
    assert ("9.9" in told[0]) is ("version" in what)
    [error] = job.together([lambda: stranger.next(None, 60.0, lets_in=False)], job.workers)
    assert isinstance(error, AGMergeError) and "number 3, cannot join the elastic job: it" in str(error)


@pytest.mark.long
@pytest.mark.parametrize("why", [GOES, None], ids=["told to go", "killed"])
def test_a_job_that_begins_again_says_how_many_steps_are_lost(why: str | None) -> None:
    """Its last worker with the state is gone, and newcomers have waited all the time."""
    job = Job()
    [old] = job.first(1)
    assert old.lost_steps is None
    job.workers[0].begin()
    job.workers[0].beat(1234)
    if why:
        job.workers[0].leave(why)
    new = job.arrive(2)
    found = job.together(asking([], [], new), new)
    assert [(numbers(one), one.lost_steps) for one in found] == [([2, 3], 1234)] * 2


def test_a_newcomer_that_outlives_the_last_worker_with_the_state_says_so_too() -> None:
    job = Job()
    [old] = job.first(1)
    job.workers[0].begin()
    [new] = job.arrive()
    now = job.together(asking(job.workers[:1], [old], [new]), job.workers)
    assert [one.lost_steps for one in now] == [None] * 2
    job.workers[0].beat(17)
    [found] = job.together([lambda: new.next(now[1], 60.0, lets_in=False)], [new])
    assert (numbers(found), found.lost_steps) == ([2], 17)


def test_a_script_may_have_an_error_in_place_of_a_training_that_begins_again() -> None:
    job = Job()
    job.first(1)
    job.workers[0].begin()
    job.workers[0].beat(1234)
    [new] = job.arrive()
    new._restart = False
    [error] = job.together([lambda: new.next(None, 60.0, lets_in=False)], [new])
    assert isinstance(error, AGMergeError) and "failed, after about 1234 steps, and restart=False" in str(error)
    assert JobStore(job.store).decided(2) is None


@pytest.mark.long
def test_who_waits_for_a_job_that_only_a_held_socket_keeps_alive_names_it() -> None:
    job, told = Job(), []
    job.first(2)
    job.answering = {2}
    [new] = job.arrive()
    new._tell = told.append
    [error] = job.together([lambda: new.next(None, 3 * SILENT, lets_in=False)], [new])
    assert isinstance(error, TooFewWorkers)
    words = "worker 2 on host has given no sign of life for 10 s, but address, port 1, which served its group, "
    assert words in str(error) and len(told) == 1 and told[0].startswith(words)


def test_what_is_written_is_read() -> None:
    store = JobStore(dist.HashStore())
    worker = Worker(store.next_number(), "host", "address", 1, "token")
    assert store.claim(worker) and store.worker(1) == worker and store.why_strange(1) == ""
    assert not JobStore(store._store).claim(Worker(1, "host", "address", 1, "another"))
    store.decide(1, [1])
    store.decide(1, [1, 2])
    assert store.decided(1) == [1] and store.decided(2) is None and store.read("members/2") is None
