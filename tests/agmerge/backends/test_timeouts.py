# SPDX-License-Identifier: Apache-2.0
"""Where the deadline of a wait comes from, and what the error of a wait that failed knows."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import mlp, on_ranks, seeded, train, wrap
from torch import nn

import agmerge
from agmerge import testing
from agmerge.backends import status, timeouts
from agmerge.runtime.peers import exit_guard, monitor

MODEL = seeded(mlp)


def test_the_default_is_five_minutes_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGMERGE_TIMEOUT", raising=False)
    assert timeouts.default() == 300.0
    monkeypatch.setenv("AGMERGE_TIMEOUT", "2.5")
    assert timeouts.default() == 2.5


@pytest.mark.parametrize(
    ("group", "ours", "counts"),
    [
        (timedelta(hours=2), "", 7200.0),
        (timedelta(minutes=1), "", 300.0),
        (None, "", 1800.0),  # torch's: so long plain DistributedDataParallel waits
        (timedelta(minutes=1), "2.5", 60.0),
        (None, "2.5", 2.5),  # chosen by the user, where the group's was not
    ],
)
def test_the_longer_time_out_counts_of_ours_and_of_the_group_that_the_script_has_made(
    monkeypatch: pytest.MonkeyPatch, group: timedelta | None, ours: str, counts: float
) -> None:
    """Its rank 0 may evaluate for longer than five minutes, and has been given the time."""
    monkeypatch.setenv("AGMERGE_TIMEOUT", ours)
    chosen = {} if group is None else {"timeout": group}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, **chosen)
    try:
        agmerge.init("torch")
        assert timeouts.default() == counts
        optimizer = agmerge.DistributedOptimizer(torch.optim.SGD(seeded(mlp).parameters(), lr=0.1), timeout=7.0)
        assert optimizer._reducer.exchange.agreed.config.guards.timeout == 7.0
    finally:
        agmerge.shutdown()
        dist.destroy_process_group()
    assert timeouts.default() == float(ours or 300)


@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan", "soon"])
def test_a_default_that_is_no_time_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("AGMERGE_TIMEOUT", text)
    with pytest.raises(ValueError, match=f"AGMERGE_TIMEOUT='{text}'"):
        wrap(seeded(mlp))


@pytest.mark.parametrize(
    "wait",
    [
        lambda model: train(model, wrap(model), 0, [0]),
        lambda model: agmerge.barrier(),
        lambda model: agmerge.allreduce(torch.ones(1)),
        lambda model: agmerge.broadcast_object({}),
        lambda model: agmerge.broadcast_parameters(model.named_parameters()),
    ],
    ids=["optimizer", "barrier", "allreduce", "broadcast_object", "broadcast_parameters"],
)
def test_the_environment_bounds_every_wait(monkeypatch: pytest.MonkeyPatch, wait: Any) -> None:
    monkeypatch.setenv("AGMERGE_TIMEOUT", "0.2")

    told = threading.Event()

    def body(rank: int, model: nn.Module) -> None:
        if rank == 1:
            told.wait(60)
            return
        try:
            wait(model)
        finally:
            told.set()

    error = on_ranks(2, MODEL, body, return_errors=True)[0]
    assert isinstance(error, agmerge.CollectiveTimeout)
    assert "within 0.2 s" in str(error) and error.missing == (1,)
    assert error.step is None and error.waited >= 0.2


def test_an_argument_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGMERGE_TIMEOUT", "0.001")
    slow = testing.jitter(0, 0.05)
    on_ranks(2, MODEL, lambda rank, model: train(model, wrap(model, timeout=60.0), rank, range(2)), inject=slow)


@pytest.mark.parametrize("at", [pytest.param(0, marks=pytest.mark.long), 2])
def test_the_error_knows_buffer_step_and_rank(at: int) -> None:
    errors: list[agmerge.CollectiveTimeout] = []
    told = threading.Barrier(3)  # nobody leaves before all have been told: that would be another error

    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model, timeout=5.0)
        train(model, optimizer, rank, range(at))
        if rank != 2:
            with pytest.raises(agmerge.CollectiveTimeout) as raised:
                train(model, optimizer, rank, [at])
            errors.append(raised.value)
        told.wait(60)

    on_ranks(3, MODEL, body)
    for error in errors:
        call = "buffer 0" if at else "membership/digest"  # the first step begins with an agreement
        assert (error.call, error.step) == (call, at)
        assert 2 in error.missing  # and the other one, where the machine is busy
        text = f"AGM201: {call}: no answer from ranks {list(error.missing)} within 5 s (in step {at}, after "
        assert str(error).startswith(text) and error.waited >= 5.0


def test_a_place_goes_back_to_what_it_was_when_the_wait_is_over() -> None:
    def body(rank: int) -> tuple[str, float, str]:
        place = status.current()
        place.enter("is in its script, before a backward pass", 5)
        since = place.since
        agmerge.barrier()
        return place.describe(), place.since - since, place.call

    for words, moved, call in testing.run(2, body):
        assert (words, moved, call) == ("is in its script, before a backward pass (step 5)", 0.0, "")


def test_a_collective_that_cannot_start_tells_the_same() -> None:
    def body(rank: int) -> None:
        status.current().enter("is in a backward pass", 7)
        error = agmerge.PeerLost("buffer 1: shut down")
        status.annotate(error, "buffer 1", [0])
        raise error

    (error,) = testing.run(1, body, return_errors=True)
    assert isinstance(error, agmerge.NoAnswer)
    assert str(error) == "buffer 1: shut down (in step 7, after 0.0 s)"
    assert (error.call, error.step, error.waited) == ("buffer 1", 7, 0.0)


def test_a_collective_that_cannot_start_is_waited_for_from_now_on() -> None:
    """The time before it would make a process that had been stopped look as if it had waited all along."""

    def body(rank: int) -> tuple[float, float]:
        place = status.current()
        place.enter("is in its script, before a backward pass", 7)
        place.since -= 100.0
        waited, since = place.fail_at("buffer 1"), place.since
        assert place.fail_at("buffer 1") >= 0.0 and place.since == since  # the same call again: the same wait
        return waited, time.monotonic() - since

    (found,) = testing.run(1, body)
    assert found[0] == 0.0 and found[1] < 50.0


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test before this one has left a step behind, which errors would name."""
    monkeypatch.setattr(status, "_process", status.RankStatus())


@pytest.mark.usefixtures("nowhere")
def test_the_backends_own_words_come_last_and_are_short() -> None:
    gloo = (
        "[/a/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3. This is typically caused by a "
        "remote worker crashing. Check the logs of the remote worker before reporting an error. GLHF!"
    )
    error = agmerge.PeerLost("buffer 1: the connection broke", gloo)
    error.advice = "Do this"
    status.annotate(error, "buffer 1", ())
    assert str(error) == "buffer 1: the connection broke. Do this (Connection closed by peer [127.0.0.1]:3)"
    assert error.words == "Connection closed by peer [127.0.0.1]:3"


@pytest.mark.usefixtures("nowhere")
def test_a_call_that_has_no_deadline_of_its_own_is_given_one() -> None:
    assert timeouts.bounded(lambda: 3, 60.0, "adding") == 3
    with pytest.raises(ZeroDivisionError):
        timeouts.bounded(lambda: 1 // 0, 60.0, "dividing")
    try:
        with pytest.raises(agmerge.CollectiveTimeout, match="(?m)sleeping: no answer .* within 0.1 s. Wake up$"):
            timeouts.bounded(lambda: time.sleep(2), 0.1, "sleeping", "Wake up")
        assert status.any_wait_failed()
    finally:
        status.reset()


HANGS = """
import ctypes, sys, time
from agmerge.backends import timeouts
with timeouts.or_die(0.5, sys.argv[1] == "armed"):
    ctypes.PyDLL(None).sleep(2)  # lets no other thread run
"""


@pytest.mark.parametrize(("armed", "code"), [("armed", 1), pytest.param("not", 0, marks=pytest.mark.long)])
def test_a_call_that_lets_no_other_thread_run_ends_the_process(armed: str, code: int) -> None:
    ended = subprocess.run([sys.executable, "-c", HANGS, armed], capture_output=True, text=True, timeout=100)
    assert ended.returncode == code
    assert ("Timeout (0:00:00.5" in ended.stderr) is (code == 1)


def handed_on(error: Exception) -> None:
    """As the children of torch.multiprocessing.spawn do."""
    try:
        raise error
    except Exception:
        sys.exit(1)


def raised(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("ends", [handed_on, raised])
def test_the_end_of_a_child_of_multiprocessing_tells_what_it_raised(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No hook of Python's is called there."""
    told: list[object] = []
    monkeypatch.setattr(monitor, "raised", told.append)
    monkeypatch.setattr(monitor, "ended", told.append)
    monkeypatch.setattr(exit_guard, "_script_failed", False)
    error = FileNotFoundError("data/train.bin: no such file")

    def child() -> None:
        try:
            ends(error)
        finally:
            exit_guard._at_exit_of_child()  # as multiprocessing calls it

    with pytest.raises((SystemExit, FileNotFoundError)):
        child()
    exit_guard._at_exit_of_child()
    assert told == [error, "came to the end of its script"]


THREAD = """
import sys, threading
from agmerge.backends import status
from agmerge.runtime.peers import exit_guard, monitor
exit_guard.install()
told = []
monitor.raised = told.append
work = threading.Thread(target=lambda: (status.current().enter("trains", 1), 1 // 0))
other = threading.Thread(target=lambda: 1 // 0)
for thread in (other, work):
    before = len(told)
    thread.start(); thread.join()
    print(thread is work, len(told) - before)
"""


def test_what_the_thread_that_trains_raises_is_told_and_what_others_raise_is_not() -> None:
    ended = subprocess.run([sys.executable, "-c", THREAD], capture_output=True, text=True, timeout=100)
    assert ended.stdout.split("\n")[:2] == ["False 0", "True 1"], ended.stderr


LEAVES = """
import atexit, ctypes, sys, time
import agmerge
from agmerge.backends import status
from agmerge.runtime.peers import exit_guard
if sys.argv[1] == "in python":
    atexit.register(time.sleep, 60)
else:
    ctypes.CDLL(None).atexit(ctypes.CDLL(None).pause)  # as a destructor of a library would
exit_guard.GRACE = 1
exit_guard.install()
status._record_failed_wait(sys.argv[2] == "lost")
if not status.any_wait_failed():
    atexit.register(lambda: __import__("os")._exit(7))
"""


@pytest.mark.parametrize(("where", "state", "codes"), [("in python", "lost", [1]), ("in c", "lost", [1, -14])])
def test_a_process_that_has_lost_a_rank_ends_whatever_hangs(where: str, state: str, codes: list[int]) -> None:
    ended = subprocess.run([sys.executable, "-c", LEAVES, where, state], capture_output=True, text=True, timeout=100)
    assert ended.returncode in codes, ended.stderr


def test_a_process_that_has_lost_none_is_left_alone() -> None:
    ended = subprocess.run([sys.executable, "-c", LEAVES, "in python", "fine"], capture_output=True, timeout=100)
    assert ended.returncode == 7
