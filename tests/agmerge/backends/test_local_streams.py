# SPDX-License-Identifier: Apache-2.0
"""Ranks in memory whose tensors are a device's: each queues into its own streams, which wait for the others'."""

from __future__ import annotations

import threading

import pytest
import torch
from support.host_streams import HostStreams

import agmerge
from agmerge import testing
from agmerge.backends import local
from agmerge.runtime import workers


class Noted(HostStreams):
    """One stream a thread; events and waits are written down."""

    def __init__(self) -> None:
        self.waits: list[tuple[int, int]] = []  # the waiting thread, and the one of the event
        self.kept: list[tuple[int, int]] = []  # a tensor's place, and the thread that reads it

    def current(self, device: torch.device) -> int:
        return threading.get_ident()

    def wait(self, stream: int, event: int) -> None:
        self.waits.append((stream, event))

    def keep(self, tensor: torch.Tensor, stream: int) -> None:
        self.kept.append((tensor.data_ptr(), stream))


@pytest.mark.parametrize("kind", ["all_gather", "all_to_all", "all_reduce", "reduce_scatter", "broadcast"])
def test_readers_wait_for_writers_of_other_threads(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    noted, size = Noted(), 3
    monkeypatch.setattr(local, "streams_of", lambda device: noted)
    monkeypatch.setattr(local, "HOST", ())

    def body(rank: int) -> tuple[int, int]:
        world, tensor = workers.world(), torch.full((size,), float(rank))
        handle = {
            "all_gather": lambda: world.all_gather(torch.zeros(size * size), tensor, "x"),
            "all_to_all": lambda: world.all_to_all(torch.zeros(size), tensor, [1] * size, [1] * size, "x"),
            "all_reduce": lambda: world.all_reduce(tensor, "x"),
            "reduce_scatter": lambda: world.reduce_scatter(torch.zeros(1), tensor, "x"),
            "broadcast": lambda: world.broadcast(tensor, 1, "x"),
        }[kind]()
        handle.wait(10.0)
        return threading.get_ident(), tensor.data_ptr()

    ranks = testing.run(size, body)
    threads = {thread for thread, _ in ranks}

    def awaited(thread: int) -> set[int]:
        return {event for waiting, event in noted.waits if waiting == thread}

    # Who computes the result waits for everybody's tensor, and everybody for the result.
    assert [last for last in threads if awaited(last) == threads and all(last in awaited(one) for one in threads)]
    assert {place for _, place in ranks} <= {place for place, _ in noted.kept}


def test_tensors_of_the_host_are_waited_for_by_nobody() -> None:
    (total, *_) = testing.run(2, lambda rank: agmerge.allreduce(torch.ones(2), op=agmerge.Sum))
    assert local.Part(total).queued().ready is None
