# SPDX-License-Identifier: Apache-2.0
"""What looks like a dead rank or a stuck network and is neither: a stop, resets, a rank that went on alone, a limit."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from agmerge import testing
from agmerge.backends import open_files, status
from agmerge.backends.status import RankStatus
from agmerge.errors import CollectiveTimeout, printable
from agmerge.runtime import workers
from agmerge.runtime.peers import answers, exit_guard, monitor
from agmerge.runtime.peers.monitor import PeerMonitor, over, report
from agmerge.runtime.peers.status_server import (
    ENDED,
    STUCK,
    UNASKED,
    UNREADABLE,
    Pause,
    PeerUnreachable,
    StatusServer,
    query_peer,
)

WAIT = 20.0
CALL, STEP = "buffer 3", 12
STOPPED = "did not run for 14.0 s: it was stopped (SIGSTOP, a debugger, a frozen container or machine)"
NOBODY = "No rank is missing: the network or the backend is stuck."


def waits(**more: Any) -> RankStatus:
    return RankStatus(f"waits for {CALL}", step=STEP, call=CALL, **more)


def opened(places: list[RankStatus]) -> list[PeerMonitor]:
    return testing.run(len(places), lambda rank: PeerMonitor(rank, over(workers.world(), WAIT), places[rank]))


def called(change: Callable[[list[PeerMonitor]], None], *others: RankStatus) -> tuple[str, tuple[int, ...]]:
    """The roll call of rank 0, which waits as the others do, after ``change``."""
    calls = opened([waits(), *(others or (waits(),))])
    try:
        change(calls)
        return calls[0].describe_missing(CALL, ())
    finally:
        for one in calls:
            one.close()


def stop(stopped: PeerMonitor) -> None:
    """As if its process had not run for 14 seconds."""
    stopped._pauses._pauses.append(Pause(time.monotonic(), 14.0, 0.0))


# -- B1: a stop ---------------------------------------------------------------------------------------------


def test_a_rank_that_was_stopped_itself_says_so() -> None:
    text, missing = called(lambda calls: stop(calls[0]))
    assert missing == () and f"This process {STOPPED}. The others may have given up meanwhile." in text
    assert "No rank is missing" not in text


def test_of_a_rank_that_was_stopped_the_others_hear_it() -> None:
    text, missing = called(lambda calls: stop(calls[1]))
    assert missing == () and f"; it {STOPPED}." in text and "No rank is missing" not in text


def test_a_stop_before_this_step_is_no_reason() -> None:
    def change(calls: list[PeerMonitor]) -> None:
        stop(calls[0])
        calls[0]._status.enter("is in step()", STEP + 1)
        calls[0]._status.enter(f"waits for {CALL}", STEP + 1)

    assert "did not run" not in called(change)[0]


def test_a_stop_that_is_short_beside_the_wait_is_no_reason() -> None:
    def change(calls: list[PeerMonitor]) -> None:
        calls[0]._status.since -= 100.0
        stop(calls[0])

    text, _ = called(change)
    assert "did not run" not in text and text.endswith(NOBODY)


def test_ranks_that_make_different_calls_are_told_so_also_after_a_stop() -> None:
    place = RankStatus("waits", step=STEP, call="allreduce/digest")
    text, _ = called(lambda calls: stop(calls[0]), place)
    assert STOPPED in text and "make different calls" in text


def test_a_rank_without_a_port_was_not_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread of it looks at the clock."""

    def none(*given: object) -> StatusServer:
        raise OSError("all are taken")

    monkeypatch.setattr(monitor, "StatusServer", none)
    with pytest.warns(UserWarning, match=r"AGM207: .*it has no status port \(all are taken\)"):
        calls = opened([waits(), waits()])
    monkeypatch.setattr("time.monotonic", lambda now=time.monotonic: now() + 300.0)
    assert "did not run" not in calls[0].describe_missing(CALL, ())[0]


def test_a_rank_that_came_after_the_others_had_given_up_is_told_so() -> None:
    place = waits(given_up=True)
    place.since -= 30.0
    text, missing = called(lambda calls: None, place)
    assert missing == () and "the others timed out before this rank reached buffer 3" in text
    assert NOBODY not in text


# -- B2: resets ---------------------------------------------------------------------------------------------


def refusing(times: int) -> Callable[..., dict[str, Any]]:
    """What asks a rank as ever, after it was refused ``times`` times."""
    left = iter(range(times))

    def ask(*given: Any) -> dict[str, Any]:
        for _ in left:
            raise PeerUnreachable(ENDED, again=True)
        return query_peer(*given)

    return ask


def test_who_refuses_is_asked_again_before_it_is_said_to_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "PAUSE", 0.01)
    text, missing = called(lambda calls: monkeypatch.setattr(monitor, "query_peer", refusing(5)))
    assert missing == () and ENDED not in text and "it waits for buffer 3 (step 12)" in text


def test_who_refuses_at_the_start_is_asked_again(monkeypatch: pytest.MonkeyPatch, recwarn: Any) -> None:
    monkeypatch.setattr(monitor, "PAUSE", 0.01)
    monkeypatch.setattr(monitor, "query_peer", refusing(5))
    for one in opened([waits(), waits()]):
        assert not one._problems()
        one.close()
    assert not recwarn.list


def test_who_has_said_that_it_ends_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "AGAIN", 1000.0)

    def change(calls: list[PeerMonitor]) -> None:
        calls[1].raised(FloatingPointError("of its own"))
        calls[1].close()

    text, missing = called(change)
    assert missing == (1,) and "it raised FloatingPointError: of its own (step 12); its process has ended" in text


@pytest.mark.parametrize(
    ("runs", "said", "times"),
    [(False, ENDED, 1), (None, ENDED, 4), (True, "its process is running, but has refused connections for 4 s", 4)],
)
def test_a_process_of_this_machine_is_looked_at(
    runs: bool | None, said: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has ended is not asked again, and what is there is not said to have ended."""
    monkeypatch.setattr(monitor, "PAUSE", 1.0)
    clock = iter(range(1000))
    slept: list[float] = []

    def change(calls: list[PeerMonitor]) -> None:
        calls[1].close()
        monkeypatch.setattr(answers.Peer, "runs", lambda self, own: runs)
        monkeypatch.setattr(monitor.time, "sleep", slept.append)
        asked = calls[0]._ask_again(1, None, WAIT, 4.0)
        assert isinstance(asked, PeerUnreachable) and said in str(asked)

    calls = opened([waits(), waits()])
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))
    change(calls)
    assert len(slept) + 1 == times
    monkeypatch.undo()
    calls[0].close()


# -- B3: who goes on alone ----------------------------------------------------------------------------------


@pytest.mark.parametrize("still_there", [True, False])
def test_who_gave_up_before_it_left_had_no_fewer_batches(still_there: bool) -> None:
    def change(calls: list[PeerMonitor]) -> None:
        calls[1].describe_missing(CALL, (0,))
        calls[1].ended("has called agmerge.shutdown()")
        if not still_there:
            calls[1].close()

    text, missing = called(change)
    assert "it had given up waiting for other ranks, and has called agmerge.shutdown() (step 12)" in text
    assert missing == () and "optimizer.join()" not in text and "numbers of batches" not in text


def test_who_left_without_a_failed_wait_may_have_had_fewer() -> None:
    def change(calls: list[PeerMonitor]) -> None:
        calls[1].ended("came to the end of its script")
        calls[1].close()

    text, missing = called(change)
    assert missing == (1,) and "optimizer.join()" in text


@pytest.mark.parametrize("lost", [True, False])
def test_who_left_because_another_was_lost_had_no_fewer_batches(lost: bool) -> None:
    """A survivor calls shutdown() in order to go on without the lost rank, while this one still waits."""
    now = time.monotonic()
    left = answers.Answer("has called agmerge.shutdown()", now, step=STEP, ended=True, over=True)
    own = answers.Answer("waits", now, call=CALL, step=STEP)
    text = report(own, {1: left, 2: PeerUnreachable(ENDED) if lost else own}, {}).text(CALL, {}, "", str)
    assert "agmerge.shutdown()" in text and ("optimizer.join()" in text) is not lost


# -- B4: too few open files ---------------------------------------------------------------------------------

LIMIT = (
    "This process has 20 open files, and the limit is 24 (ulimit -n), which is not enough to connect 2 ranks. "
    "Raise the limit"
)


def test_too_few_open_files_are_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "counted", lambda: (20, 24))
    text, missing = called(lambda calls: None)
    assert missing == () and LIMIT in text and NOBODY not in text
    assert "; it has 20 open files, and the limit is 24 (ulimit -n)" in text  # the other is in this process


def test_too_few_open_files_are_said_before_ranks_can_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "counted", lambda: (20, 24))
    monkeypatch.setattr(status, "_peer_query", None)
    error = CollectiveTimeout("init(): no answer")
    try:
        status.annotate(error, "init()", ())
    finally:
        status.reset()
    assert LIMIT in str(error)


def test_who_can_open_no_file_does_not_say_that_others_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "AGAIN", 0.4)

    def unasked(*given: object) -> dict[str, Any]:
        raise PeerUnreachable(UNASKED, again=True)

    text, missing = called(lambda calls: monkeypatch.setattr(monitor, "query_peer", unasked))
    assert missing == () and text.startswith("Not known: rank 1 (host ") and UNASKED in text
    assert ENDED not in text and NOBODY not in text


def test_a_process_ends_though_it_can_open_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    alarms: list[int] = []
    monkeypatch.setattr(status, "any_wait_failed", lambda: True)
    monkeypatch.setattr(os, "open", full)
    monkeypatch.setattr(signal, "signal", lambda *given: None)
    monkeypatch.setattr(signal, "alarm", alarms.append)
    exit_guard._at_exit()
    assert alarms == [exit_guard.GRACE + 1]


# -- what ranks hand on, and what is no answer ---------------------------------------------------------------


def test_a_rank_hands_on_only_what_it_was_told_itself() -> None:
    """So that its answer stays short in a job of many ranks."""
    calls = opened([waits() for _ in range(4)])
    try:
        calls[3].tell(replace(calls[3]._own_answer(), ended=True, words="came to its end"), (1,))
        for asking, heard in ((0, {3}), (2, {3})):
            calls[asking].tell(calls[asking]._own_answer(), (1,))
            assert set(calls[asking]._heard) == heard
        calls[2].tell(calls[2]._own_answer(), (0,))
        assert set(calls[0]._last_words()) == {2, 3}
        assert calls[0]._answer({"rank": 2})["heard"] == {}
        assert set(calls[1]._answer({"rank": 2})["heard"]) == {"3"}
    finally:
        for one in calls:
            one.close()


@pytest.mark.parametrize("said", [{}, {"words": 3}, {"words": "x", "seconds": 10**400}, {"seconds": 1, "heard": []}])
def test_an_answer_that_is_none_is_no_error_of_this_rank(said: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    text, missing = called(lambda calls: monkeypatch.setattr(monitor, "query_peer", lambda *given: said))
    assert missing == (1,) and UNREADABLE in text and STUCK not in text


@pytest.mark.parametrize("wrong", [{"rank": 2}, {"rank": -1}, {"rank": 0, "says": {}}, {"rank": 0, "says": 3}, {}])
def test_a_question_that_is_none_leaves_no_trace(wrong: dict[str, Any]) -> None:
    def change(calls: list[PeerMonitor]) -> None:
        with pytest.raises((ValueError, KeyError)):
            calls[1]._answer(wrong)
        assert not calls[1]._told

    assert called(change)[1] == ()


def test_what_others_say_is_printed_without_escapes() -> None:
    """A stranger who has the token might say anything of any rank."""
    evil = "raised X\n\x1b[2Krank 0 (host a): it is fine"

    def change(calls: list[PeerMonitor]) -> None:
        says = replace(calls[1]._own_answer(), words=evil, over=True)
        calls[1].tell(says, (0,))
        calls[1].close()

    text, missing = called(change, RankStatus("is in step()", step=STEP))
    assert missing == (1,) and "it raised X rank 0 (host a): it is fine; its process has ended" in text
    assert text == printable(text)
