# SPDX-License-Identifier: Apache-2.0
"""What ranks say of themselves, and what is made of it where somebody else has said it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from typing import Any

import pytest

from agmerge.errors import printable
from agmerge.runtime.peers.answers import Answer, Peer, heard, number, space

SAID = Answer("waits for buffer 3 (step 12)", 0.0, "buffer 3", 12, True, False, True, "did not run")
PEER = Peer("node-1", 77, "boot 1 pid:[2]", "10.0.0.7", 4567, "0123")


def test_what_is_said_is_read_again() -> None:
    said = json.loads(json.dumps(replace(SAID, since=time.monotonic() - 30.0).said()))
    read = Answer.read(said)
    assert replace(read, since=0.0) == SAID
    assert 30.0 <= time.monotonic() - read.since < 300.0
    assert Peer.read(json.dumps(asdict(PEER)).encode()) == PEER


WRONG: dict[str, list[Any]] = {
    "seconds": ["3", None, True, float("nan"), float("inf"), 10**400, [1]],
    "step": ["3", 1.5, True, [1]],
    "given_up": [1, "yes", None],
    "ended": [0],
    "over": [{}],
    "words": [3, None, ["x"]],
    "call": [{"x": 1}],
    "trouble": [7],
}


@pytest.mark.parametrize("name", WRONG)
def test_what_no_rank_says_is_refused(name: str) -> None:
    for value in WRONG[name]:
        with pytest.raises(ValueError, match="no "):
            Answer.read({**SAID.said(), name: value})


@pytest.mark.parametrize("said", [None, [], "text", 3, {}, {"words": "x"}])
def test_what_is_no_account_at_all_is_refused(said: Any) -> None:
    with pytest.raises(ValueError, match="no "):
        Answer.read(said)


@pytest.mark.parametrize("rank", [-1, 3, "3", "-1", True, None, 1.0, "x", "", "²", "1" * 5000, []])
def test_a_number_that_no_rank_has_is_refused(rank: Any) -> None:
    with pytest.raises(ValueError, match="no such rank|invalid literal"):
        number(rank, 3)


def test_what_others_have_heard_is_checked_as_what_they_say() -> None:
    assert list(heard({"heard": {"2": SAID.said()}}, 3)) == [2]
    assert heard({}, 3) == {}
    for wrong in ({"heard": []}, {"heard": {"3": SAID.said()}}, {"heard": {"2": {}}}, {"heard": {"2": None}}):
        with pytest.raises(ValueError, match="no "):
            heard(wrong, 3)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param(b"[" * 1_000_000, "too deep", id="deep"),
        (b"[]", "no JSON object"),
        (b"\xff", "can't decode"),
        (b"{}", "no pid"),
        (json.dumps({**asdict(PEER), "port": 1 << 16}).encode(), "no port"),
        (json.dumps({**asdict(PEER), "port": True}).encode(), "no port"),
        (json.dumps({**asdict(PEER), "pid": -1}).encode(), "no pid"),
        (json.dumps({**asdict(PEER), "address": 3}).encode(), "address is no text"),
    ],
)
def test_a_rank_whose_address_cannot_be_read_is_one_that_cannot_be_reached(text: bytes, why: str) -> None:
    problem = Peer.read(text).problem
    assert problem.startswith("what it has said of itself cannot be read (") and why in problem


# -- what is printed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("buffer 3", "buffer 3"),
        ("raised E: a\nb\r\n\n  c", "raised E: a b c"),
        ("\x1b[31mred\x1b[0m, \x9b1mbold", "red, bold"),
        ("\x1b]0;title\x07text \x1b]8;;http://x\x1b\\link", "text link"),
        ("\x1bcreset", "reset"),
        ("a\x00b\x07c\x7fd\x08e", "a b c d e"),
        ("one\u202etwo\u2028three\ud800four", "one two three four"),
        ("ä 中 😀", "ä 中 😀"),
        ("x" * 5000, "x" * 2000),
    ],
)
def test_what_another_process_says_is_one_line_that_does_nothing(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize("name", ["words", "call", "trouble"])
def test_no_field_of_an_answer_reaches_a_terminal_as_it_is(name: str) -> None:
    evil = "fine\n\x1b[2K\x1b[1Arank 0: all is well" + "!" * 100_000
    shown = getattr(Answer.read({**SAID.said(), name: evil}), name)
    assert shown.startswith("fine rank 0: all is well!!") and shown.isprintable() and len(shown) <= 1200


@pytest.mark.parametrize("name", ["host", "space", "address", "token", "problem"])
def test_no_field_of_an_address_reaches_a_terminal_as_it_is(name: str) -> None:
    evil = json.dumps({**asdict(PEER), name: "node\n\x1b]0;x\x07-1" + "!" * 100_000}).encode()
    shown = getattr(Peer.read(evil), name)
    assert shown.startswith("node -1!!") and shown.isprintable() and len(shown) <= 300
    assert PEER.with_problem("a\n\x1b[1mb").problem == "a b"


# -- whether a process is there -----------------------------------------------------------------------------

needs_proc = pytest.mark.skipif(not space(), reason="this system has no /proc")


@needs_proc
def test_a_process_of_this_machine_is_seen_to_run_and_to_have_ended() -> None:
    own = Peer("here", os.getpid(), space())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        other = Peer("here", process.pid, space())
        assert other.runs(own) is True
        assert process.stdin is not None
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has asked for it
        assert other.runs(own) is False
    assert other.runs(own) is False


@needs_proc
@pytest.mark.parametrize("change", [{"space": ""}, {"space": "another machine"}, {}])
def test_of_other_processes_nothing_is_known(change: dict[str, str]) -> None:
    """Of another machine or container, or where ranks are threads of one process."""
    own = Peer("here", os.getpid(), space())
    other = replace(own, pid=os.getppid(), **change) if change else own
    assert other.runs(own) is None
