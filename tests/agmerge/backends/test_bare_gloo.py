# SPDX-License-Identifier: Apache-2.0
"""Communicators of Gloo that are being made when one of their ranks is lost."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch.distributed as dist

from agmerge.backends.bare_gloo import BareGloo, Broken
from agmerge.errors import PeerLost


def pair(timeout: float) -> tuple[list[BareGloo], Broken]:
    """Return two ranks of one group, whose collectives end after ``timeout`` seconds."""
    store, broken, groups = dist.HashStore(), Broken(), {}

    def connect(rank: int) -> None:
        groups[rank] = BareGloo(dist, store, rank, 2, (rank, 2), timeout, broken)

    threads = [threading.Thread(target=connect, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [groups[0], groups[1]], broken


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["copy", "part"])
def test_who_connects_to_one_that_is_lost_does_not_wait_for_the_time_out(kind: str) -> None:
    groups, broken = pair(30.0)
    begun = time.monotonic()
    threading.Timer(0.3, broken.give_up, ["no sign of worker 2"]).start()
    with pytest.raises(PeerLost, match="no sign of worker 2"):  # which does not make its own
        groups[0].duplicate("copy", 20.0) if kind == "copy" else groups[0].subgroup([0, 1], "part", 20.0)
    assert time.monotonic() - begun < 15.0 and groups[0].has_failed


@pytest.mark.timeout(60)
def test_a_group_that_was_given_up_is_forgotten_at_once() -> None:
    """Gloo's destructor waits for what is under way, and no other thread of Python runs meanwhile: no sign of life."""
    groups, broken = pair(10.0)
    barrier = groups[0].barrier("of two")  # the other one makes none, and lives
    broken.give_up("a worker is lost")
    with pytest.raises(PeerLost, match="a worker is lost"):
        barrier.wait(5.0)
    begun = time.monotonic()
    del groups[0], barrier
    gc.collect()
    assert time.monotonic() - begun < 5.0
