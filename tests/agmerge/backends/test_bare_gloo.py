# SPDX-License-Identifier: Apache-2.0
"""Communicators of Gloo that are being made, or used no more, when one of their ranks is lost."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from agmerge.backends.bare_gloo import BareGloo, Broken, count_left, release_left
from agmerge.errors import PeerLost


def together(connect: Callable[[int], BareGloo]) -> list[BareGloo]:
    """``connect(rank)`` on two ranks at once."""
    made: dict[int, BareGloo] = {}
    threads = [threading.Thread(target=lambda at=at: made.update({at: connect(at)}), daemon=True) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [made[0], made[1]]


def pair(timeout: float) -> tuple[list[BareGloo], Broken]:
    """Return two ranks of one group, whose collectives end after ``timeout`` seconds."""
    store, broken = dist.HashStore(), Broken()
    return together(lambda rank: BareGloo(dist, store, rank, 2, (rank, 2), timeout, broken)), broken


def open_files_and_threads() -> tuple[int, int]:
    """Those of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def until(what: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until ``what()`` is true, or fail."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        release_left()
        time.sleep(0.01)


@pytest.mark.parametrize("kind", ["copy", "part"])
def test_who_connects_to_one_that_is_lost_does_not_wait_for_the_time_out(kind: str) -> None:
    groups, broken = pair(120.0)
    begun = time.monotonic()
    threading.Timer(0.3, broken.give_up, ["no sign of worker 2"]).start()
    with pytest.raises(PeerLost, match="no sign of worker 2"):  # which does not make its own
        groups[0].duplicate("copy", 100.0) if kind == "copy" else groups[0].subgroup([0, 1], "part", 100.0)
    assert time.monotonic() - begun < 60.0 and groups[0].has_failed


def test_a_group_that_was_given_up_is_forgotten_at_once() -> None:
    """Gloo's destructor waits for what is under way, and no other thread of Python runs meanwhile: no sign of life."""
    groups, broken = pair(120.0)
    barrier = groups[0].barrier("of two")  # the other one makes none, and lives
    broken.give_up("a worker is lost")
    with pytest.raises(PeerLost, match="a worker is lost"):
        barrier.wait(60.0)
    gc.collect()  # of the tests before, which takes its time
    begun = time.monotonic()
    del groups[0], barrier
    assert count_left() == 1 and time.monotonic() - begun < 60.0
    groups.clear()  # ends what is under way in the other one
    until(lambda: count_left() == 0)


@pytest.mark.timeout(120)
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="open files are counted in /proc")
def test_a_job_with_many_changes_runs_out_of_nothing() -> None:
    """Each change leaves groups behind, with what was under way; their files and threads are given back."""
    release_left()
    before: list[tuple[int, int]] = []
    for _ in range(4):
        groups, broken = pair(10.0)
        groups += together(lambda rank, of=tuple(groups): of[rank].duplicate("copy", 10.0))
        handles = [group.barrier("of two") for group in groups[::2]]  # those of rank 1 make none
        broken.give_up("a worker is lost")
        for handle in handles:
            with pytest.raises(PeerLost):
                handle.wait(5.0)
        del handles, handle
        groups[0].drop()
        assert count_left() == 1  # it waits for rank 1
        while groups:  # first one of rank 1, in which nothing is under way
            groups.pop().drop()
        until(lambda: count_left() == 0)
        before.append(open_files_and_threads())
    assert before[1:] == before[:1] * 3
