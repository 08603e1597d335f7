# SPDX-License-Identifier: Apache-2.0
"""The thread that makes a library's calls: what becomes of a call that never ends."""

from __future__ import annotations

import gc
import weakref

import pytest

from agmerge.backends.streams import Progress


class Endless:
    """A request of a call that other ranks never take part in, until it is told to end."""

    def __init__(self) -> None:
        self.ends = False

    def Test(self) -> bool:
        return self.ends


class Buffer:
    """What a call writes to."""


@pytest.mark.parametrize("ends", [False, True])
def test_buffers_of_calls_that_are_under_way_outlive_the_thread(ends: bool) -> None:
    """A library that is finalised when all objects are freed may still write to them: that was a crash in malloc."""
    progress, request = Progress("test"), Endless()

    def started() -> weakref.ref[Buffer]:
        buffer = Buffer()

        def make(held: Buffer = buffer) -> Endless:
            return request

        call = progress.start(make)
        assert call.begun.wait(60.0)
        request.ends = ends
        assert not ends or call.ended.wait(60.0)
        return weakref.ref(buffer)

    alive = started()
    progress.end()
    gc.collect()
    assert (alive() is None) is ends
