# SPDX-License-Identifier: Apache-2.0
"""A wait that lasts long is told once, with the call that is waited for, before any time-out ends it."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from agmerge.backends.status import RankStatus, StallWatch

WORDS = "All ranks must make this call: check that it is not inside `if rank() == 0`."


def waiting(call: str, since: float, step: int | None = None) -> RankStatus:
    """Return the status of a rank that waits for ``call`` since then."""
    status = RankStatus(step=step)
    status.wait_for(call)
    status.since = since
    return status


def test_a_wait_of_half_a_minute_has_one_line_that_says_what_to_look_for() -> None:
    watch = StallWatch(waiting("avg_loss", since=100.0, step=12), env={"RANK": "1"})
    assert watch.line(129.9) == ""
    line = watch.line(131.0)
    assert line.startswith("agmerge: rank 1 has waited 31 s for avg_loss in step 12. ") and WORDS in line
    assert watch.line(500.0) == ""


def test_each_call_has_a_line_of_its_own_and_only_while_it_is_waited_for() -> None:
    status = waiting("init()", since=0.0)
    before = replace(RankStatus(), phase="is in its script")
    watch = StallWatch(status, env={})
    assert watch.line(40.0).startswith("agmerge: this process has waited 40 s for init(). ")
    status.resume(before)
    assert watch.line(1e6) == ""
    status.wait_for("buffer 3")
    assert "buffer 3" in watch.line(time.monotonic() + 31.0)


def test_a_wait_that_has_failed_is_told_by_its_error_alone() -> None:
    status = waiting("buffer 3", since=0.0)
    status.phase = "has given up waiting for buffer 3"
    assert StallWatch(status, env={}).line(100.0) == ""


def test_the_thread_prints_the_line_and_is_started_once(capfd: pytest.CaptureFixture[str]) -> None:
    watch = StallWatch(waiting("buffer 3", time.monotonic() - 60.0), every=0.2, env={"RANK": "0"})
    watch.watch()
    watch.watch()
    assert sum(thread is watch._thread for thread in threading.enumerate()) == 1
    text, end = "", time.monotonic() + 20.0
    while WORDS not in text and time.monotonic() < end:
        time.sleep(0.01)
        text += capfd.readouterr().err
    assert text.count("rank 0 has waited 60 s for buffer 3") == 1
