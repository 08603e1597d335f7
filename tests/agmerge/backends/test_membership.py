# SPDX-License-Identifier: Apache-2.0
"""Membership of an elastic job: one decision a generation, the oldest first, and nobody waits for a lost worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from agmerge.backends.job_store import JobStore
from agmerge.backends.membership import ENDS, GOES, HURRY, SILENT, Generation, Membership, Worker
from agmerge.errors import AGMergeError, TooFewWorkers

SUSPECT = 5 * HURRY


class Clock:
    """Clock of a test, which runs only when it is told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Job:
    """Job in one process. Its workers beat when ``beat`` says so."""

    def __init__(self, least: int = 1) -> None:
        self.store, self.clock, self.least = dist.HashStore(), Clock(), least
        self.answering: set[int] = set()  # numbers of workers that can be reached
        self.workers: list[Membership] = []

    def arrive(self, count: int = 1) -> list[Membership]:
        """Return so many new workers."""
        own = self.store, "host", "address", 1, self.least, self.answers
        new = [Membership(*own, suspect=SUSPECT, now=self.clock) for _ in range(count)]
        self.workers += new
        return new

    def answers(self, worker: Worker) -> bool:
        """Return whether a worker can be reached."""
        return worker.number in self.answering

    def together(self, asks: list[Callable[[], Generation]], living: list[Membership]) -> list[Any]:
        """Call all of ``asks`` at once, while time passes and ``living`` beat; return results or errors."""
        found: list[Any] = [None] * len(asks)

        def body(number: int) -> None:
            try:
                found[number] = asks[number]()
            except AGMergeError as error:
                found[number] = error

        threads = [threading.Thread(target=body, args=(number,), daemon=True) for number in range(len(asks))]
        for one in living:  # a thread may look at the others before this one goes on
            one.beat()
        for thread in threads:
            thread.start()
        for _ in range(1000):
            for one in living:
                one.beat()
            self.clock.seconds += HURRY / 20
            for thread in threads:
                thread.join(0.02)
            if not any(thread.is_alive() for thread in threads):
                return found
        raise AssertionError("no generation was formed")

    def first(self, count: int) -> list[Generation]:
        """Return the first generation, as each of ``count`` workers sees it."""
        new = self.arrive(count)
        return self.together([lambda one=one: one.next(None, 60.0, lets_in=False) for one in new], new)  # type: ignore


def numbers(generation: Generation) -> list[int]:
    return [one.number for one in generation.members]


def test_the_first_generation_waits_for_first_workers() -> None:
    job = Job(least=1)
    early, late = (
        Membership(job.store, "host", "address", 1, 1, job.answers, suspect=SUSPECT, now=job.clock, first=2)
        for _ in range(2)
    )
    early.beat()
    alone = job.together([lambda: early.next(None, 5.0, lets_in=False)], [early])
    assert isinstance(alone[0], AGMergeError)
    both = [early, late]
    formed = job.together([lambda one=one: one.next(None, 60.0, lets_in=False) for one in both], both)
    assert [len(one.members) for one in formed] == [2, 2]


def test_the_first_generation_has_all_that_are_there_by_age() -> None:
    found = Job().first(3)
    assert [numbers(one) for one in found] == [[1, 2, 3]] * 3
    assert [one.own for one in found] == [0, 1, 2] and {one.number for one in found} == {1}
    assert found[0].newcomers == (0, 1, 2)


def test_survivors_keep_their_order_and_do_not_wait_for_the_dead() -> None:
    job = Job()
    before = job.first(3)
    left = [0, 2]
    found = job.together(
        [lambda i=i: job.workers[i].next(before[i], 60.0, lets_in=False) for i in left],  # type: ignore[misc]
        [job.workers[i] for i in left],
    )
    assert [numbers(one) for one in found] == [[1, 3]] * 2 and [one.own for one in found] == [0, 1]
    assert found[0].number == 2 and found[0].newcomers == ()


@pytest.mark.long
def test_one_that_is_silent_and_answers_is_waited_for_until_it_is_suspect() -> None:
    """A busy processor gives it no time: its connections are still accepted. It beats again, and none has gone on."""
    job = Job()
    before = job.first(3)
    job.answering = {2}
    begun = job.clock.seconds
    asks = [lambda i=i: job.workers[i].next(before[i], 60.0, lets_in=False) for i in (0, 2)]  # type: ignore[misc]

    def late() -> Generation:
        while job.clock.seconds < begun + SUSPECT - HURRY:
            time.sleep(0.005)
        job.workers[1].beat()
        return job.workers[1].next(before[1], 60.0, lets_in=False)

    found = job.together([*asks, late], [job.workers[0], job.workers[2]])
    assert [numbers(one) for one in found] == [[1, 2, 3]] * 3
    again = [lambda i=i: job.workers[i].next(found[i - (i > 1)], 60.0, lets_in=False) for i in (0, 2)]  # type: ignore[misc]
    now = job.clock.seconds
    after = job.together(again, [job.workers[0], job.workers[2]])
    assert [numbers(one) for one in after] == [[1, 3]] * 2 and job.clock.seconds - now >= SUSPECT - HURRY


def test_a_look_that_takes_long_makes_nobody_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that gets no processor behind its look does not know whether others have beaten meanwhile."""
    job = Job()
    job.first(2)
    first, second = job.workers
    read = first._store.read

    def late(key: str) -> bytes | None:
        found = read(key)
        job.clock.seconds += 1.5 * HURRY
        second.beat()
        return found

    first.silence(second.own.number)
    monkeypatch.setattr(first._store, "read", late)
    assert first.silence(second.own.number) < HURRY


@pytest.mark.long
def test_who_computes_is_waited_for_as_long_as_it_lives() -> None:
    """A worker that beats and does not ask keeps the others waiting: slow is not dead."""
    job = Job()
    before = job.first(2)
    found = job.together([lambda: job.workers[0].next(before[0], 30.0, lets_in=False)], job.workers)
    assert isinstance(found[0], TooFewWorkers)


def test_newcomers_are_let_in_when_members_say_so() -> None:
    job = Job()
    before = job.first(2)
    new = job.arrive()
    assert job.workers[0].newcomers_wait()
    asks = [lambda i=i: job.workers[i].next(before[i], 60.0, lets_in=False) for i in range(2)]
    kept = job.together(asks, job.workers)  # type: ignore[arg-type]
    assert [numbers(one) for one in kept] == [[1, 2]] * 2
    asks = [lambda i=i: job.workers[i].next(kept[i], 60.0, lets_in=True) for i in range(2)]
    asks.append(lambda: new[0].next(None, 60.0, lets_in=False))  # type: ignore[misc]
    found = job.together(asks, job.workers)  # type: ignore[arg-type]
    assert [numbers(one) for one in found] == [[1, 2, 3]] * 3 and found[0].newcomers == (2,)
    assert not job.workers[0].newcomers_wait()


def test_a_newcomer_that_has_died_is_let_in_no_more() -> None:
    """Else every step after it would form a group anew."""
    job = Job()
    before = job.first(2)
    job.arrive()
    assert job.workers[0].newcomers_wait()
    job.clock.seconds += HURRY / 2
    assert job.workers[0].newcomers_wait()
    job.clock.seconds += HURRY
    assert not job.workers[0].newcomers_wait()
    [new] = job.arrive()
    assert job.workers[0].newcomers_wait()
    asks = [lambda i=i: job.workers[i].next(before[i], 60.0, lets_in=True) for i in range(2)]
    asks.append(lambda: new.next(None, 60.0, lets_in=False))  # type: ignore[misc]
    found = job.together(asks, [*job.workers[:2], new])  # type: ignore[arg-type]
    assert [numbers(one) for one in found] == [[1, 2, 4]] * 3


def test_a_newcomer_that_was_silent_when_a_later_one_was_let_in_comes_in_after_it() -> None:
    job = Job()
    before = job.first(2)
    slow, quick = job.arrive(2)
    asks = [lambda i=i: job.workers[i].next(before[i], 60.0, lets_in=True) for i in range(2)]
    asks.append(lambda: quick.next(None, 60.0, lets_in=False))  # type: ignore[misc]
    job.workers[0].silence(slow.own.number)
    job.clock.seconds += HURRY / 2
    job.workers[0].silence(slow.own.number)
    job.clock.seconds += HURRY
    now = job.together(asks, [*job.workers[:2], quick])  # type: ignore[arg-type]
    assert [numbers(one) for one in now] == [[1, 2, 4]] * 3
    members = [*job.workers[:2], quick]
    asks = [lambda i=i: members[i].next(now[i], 60.0, lets_in=True) for i in range(3)]
    found = job.together(
        [lambda: slow.next(None, 30.0, lets_in=False), *(lambda ask=ask: after(slow, ask) for ask in asks)],  # type: ignore[arg-type,misc]
        [*members, slow],
    )
    assert [numbers(one) for one in found] == [[1, 2, 4, 5]] * 4


def after(newcomer: Membership, ask: Callable[[], Generation]) -> Generation:
    """Return the result of ``ask``, once a newcomer has another number than the one that it came with."""
    end = time.monotonic() + 10
    while newcomer.own.number == 3 and time.monotonic() < end:
        time.sleep(0.01)
    return ask()


@pytest.mark.parametrize("is_dead", [False, True])
def test_newcomers_do_not_begin_anew_while_one_that_has_the_state_lives(is_dead: bool) -> None:
    """It was silent for a moment, as on a machine that is overloaded."""
    job = Job()
    [old] = job.first(1)
    job.workers[0].begin()
    [new] = job.arrive()
    asks = [lambda: job.workers[0].next(old, 60.0, lets_in=True), lambda: new.next(None, 60.0, lets_in=False)]
    now = job.together(asks, job.workers)  # type: ignore[arg-type]
    started = job.clock.seconds

    def later() -> Generation:
        while job.clock.seconds < started + 3 * HURRY:
            time.sleep(0.001)
        return job.workers[0].next(now[0], 60.0, lets_in=False)

    asks = [lambda: new.next(now[1], 60.0, lets_in=False), *([] if is_dead else [later])]
    found = job.together(asks, [new])  # type: ignore[arg-type]
    assert [numbers(one) for one in found] == ([[2]] if is_dead else [[1, 2]] * 2)
    assert not is_dead or job.clock.seconds - started > SILENT


def test_who_was_silent_and_comes_back_is_told() -> None:
    job = Job()
    before = job.first(3)
    left = job.workers[:2]
    job.together([lambda i=i: left[i].next(before[i], 60.0, lets_in=False) for i in range(2)], left)  # type: ignore
    with pytest.raises(AGMergeError, match=r"AGM210.*Restart it to join again"):
        job.workers[2].next(before[2], 60.0, lets_in=False)


def test_too_few_workers_end_their_step_and_then_wait_for_others() -> None:
    """Among themselves while a step is under way; where newcomers may come in they wait, and say so in the end."""
    job = Job(least=2)
    before = job.first(2)
    found = job.together([lambda: job.workers[0].next(before[0], 10.0, lets_in=False)], job.workers[:1])
    assert numbers(found[0]) == [1]
    waited = job.together([lambda: job.workers[0].next(found[0], 10.0, lets_in=True)], job.workers[:1])
    assert isinstance(waited[0], TooFewWorkers) and "at least 2 workers, but had 1" in str(waited[0])


def test_a_store_that_was_started_again_learns_of_the_job() -> None:
    """Of its workers, of which the youngest was lost, and its generation: newcomers find it and come in."""
    job = Job()
    before = job.first(3)
    job.store = dist.HashStore()
    for one in (2, 0):
        job.workers[one].reconnect(job.store, before[one])
        job.workers[one].reconnect(job.store, before[one])  # the connection was lost once more, the store was not
    (new,) = job.arrive()
    assert new.own.number == 4 and job.workers[0].newcomers_wait()
    left = [0, 2]
    asks = [lambda i=i: job.workers[i].next(before[i], 60.0, lets_in=True) for i in left]
    asks.append(lambda: new.next(None, 60.0, lets_in=False))  # type: ignore[misc]
    found = job.together(asks, [*(job.workers[i] for i in left), new])  # type: ignore[arg-type]
    assert [numbers(one) for one in found] == [[1, 3, 4]] * 3 and found[0].number == 2


def test_a_store_that_was_started_again_is_told_at_once_who_has_the_state() -> None:
    """A newcomer that looked before would begin again."""
    job = Job()
    (before,) = job.first(1)
    (worker,) = job.workers
    worker.begin()
    job.store = dist.HashStore()
    worker.reconnect(job.store, before)
    assert JobStore(job.store).has_begun(worker.own.number)


def test_others_may_have_begun_where_the_number_of_a_worker_is_free() -> None:
    job = Job()
    before = job.first(3)
    youngest = job.workers[2]
    job.store, job.workers = dist.HashStore(), []
    job.first(2)
    assert youngest.own.number == 3 and numbers(before[2]) == [1, 2, 3]
    with pytest.raises(AGMergeError, match="AGM215"):
        youngest.reconnect(job.store, before[2])


@pytest.mark.parametrize("decided", [False, True])
def test_there_are_no_two_jobs_where_strangers_come_first(decided: bool) -> None:
    """Workers of a job come back to a lighthouse where others have their numbers already, or train already."""
    job = Job()
    before = job.first(2)
    old = job.workers
    job.store, job.workers = dist.HashStore(), []
    if decided:
        job.first(3)
    else:
        job.arrive()
    with pytest.raises(AGMergeError, match="AGM215"):
        old[0].reconnect(job.store, before[0])


def test_who_leaves_is_not_waited_for() -> None:
    job = Job()
    before = job.first(2)
    job.workers[1].leave()
    found = job.together([lambda: job.workers[0].next(before[0], 60.0, lets_in=False)], job.workers)
    assert numbers(found[0]) == [1]


def test_who_leaves_waits_for_no_other_generation() -> None:
    """A thread that still waited would come back from torch once the interpreter has ended, and abort the process."""
    job = Job()
    first, second = job.arrive(2)
    now, _ = job.together(
        [lambda: first.next(None, 60.0, lets_in=False), lambda: second.next(None, 60.0, lets_in=False)], [first, second]
    )
    found: list[BaseException] = []

    def wait() -> None:
        with pytest.raises(AGMergeError, match="AGM216") as caught:
            first.next(now, 600.0, lets_in=False)
        found.append(caught.value)

    second.beat()
    waits = threading.Thread(target=wait, daemon=True)
    waits.start()
    waits.join(0.2)
    assert waits.is_alive()  # for the second one, which lives and does not ask
    first.leave()
    waits.join(10.0)
    assert len(found) == 1


@pytest.mark.parametrize("why", [GOES, None], ids=["told to go", "killed"])
def test_a_job_whose_workers_are_gone_is_begun_anew(why: str | None) -> None:
    """As where all were preempted: without a lighthouse that is started again."""
    job = Job(least=2)
    job.first(2)
    for one in list(job.workers) if why else ():
        one.leave(why)
    new = job.arrive(2)
    second = job.together([lambda one=one: one.next(None, 60.0, lets_in=False) for one in new], new)  # type: ignore
    assert [numbers(one) for one in second] == [[3, 4]] * 2 and [one.number for one in second] == [2, 2]
    assert all(one.newcomers == (0, 1) for one in second)


@pytest.mark.long
def test_a_job_that_answers_is_not_begun_a_second_time() -> None:
    """Its workers are silent, since they cannot reach the lighthouse; they train on."""
    job = Job()
    job.first(2)
    job.answering = {2}
    [new] = job.arrive()
    [error] = job.together([lambda: new.next(None, 30.0, lets_in=False)], [new])
    assert isinstance(error, TooFewWorkers)


@pytest.mark.parametrize("other", [ENDS, GOES, None], ids=["ended", "told to go", "killed"])
def test_who_comes_to_a_job_that_has_ended_is_told(other: str | None) -> None:
    job = Job()
    job.first(2)
    job.workers[0].leave(ENDS)
    if other:
        job.workers[1].leave(other)
    [new] = job.arrive()
    [error] = job.together([lambda: new.next(None, 60.0, lets_in=False)], [new])
    assert isinstance(error, AGMergeError) and "AGM217" in str(error)


def test_who_has_not_looked_for_long_counts_nobody_as_lost_for_that() -> None:
    """A process without a processor, or with a store that does not answer, sees all others silent afterwards."""
    job = Job()
    first, second = job.arrive(2)
    job.answering = {second.own.number}
    assert not first.is_lost(second.own.number)
    job.clock.seconds += 3 * SUSPECT
    assert first.silence(second.own.number) == HURRY and not first.is_lost(second.own.number)
    looked = 0
    while not first.is_lost(second.own.number):
        job.clock.seconds += HURRY / 2
        looked += 1
    assert looked == 2 * (SUSPECT - HURRY) / HURRY  # since then it has looked all the time
