# SPDX-License-Identifier: Apache-2.0
"""Read and write a rank's account of itself; another process may claim to be a rank.

All input from outside is checked here, field by field, before it is stored, handed on or printed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from agmerge.errors import printable

LONGEST_WORDS, LONGEST_CALL, LONGEST_NAME = 1200, 300, 300  # characters
LONGEST_TIME = 1e9  # seconds: thirty years
PORTS = 1 << 16


@dataclass(frozen=True)
class Answer:
    """Account of a rank's activity, in its own words."""

    words: str  # to be read after "it"
    since: float  # seconds of this process's monotonic clock: when that began
    call: str = ""  # the collective that it waits for; empty: none
    step: int | None = None  # exchanges that it has committed; None: before the first step
    given_up: bool = False  # it has waited in vain
    ended: bool = False  # its script has come to a normal end
    over: bool = False  # its script has ended, by an error or normally
    trouble: str = ""  # a problem of its own process, to be read after "it"; empty: none that it knows

    def said(self) -> dict[str, Any]:
        """Return it as JSON can hold it, with seconds in place of a clock that is this process's own."""
        own = {name: value for name, value in vars(self).items() if name != "since"}
        return {**own, "seconds": time.monotonic() - self.since}

    @classmethod
    def read(cls, said: object) -> Answer:
        """Return the answer that :meth:`said` packed on another rank; raise ``ValueError`` for anything else."""
        fields = _dict(said)
        seconds, step = fields.get("seconds"), fields.get("step")
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not abs(seconds) < LONGEST_TIME:
            raise ValueError("no number of seconds")  # nor is NaN, which compares as false
        if step is not None and (isinstance(step, bool) or not isinstance(step, int)):
            raise ValueError("no step")
        flags = {name: fields.get(name, False) for name in ("given_up", "ended", "over")}
        if not all(isinstance(flag, bool) for flag in flags.values()):
            raise ValueError("no flag")
        return cls(
            _text(fields, "words", LONGEST_WORDS),
            time.monotonic() - seconds,
            _text(fields, "call", LONGEST_CALL),
            step,
            trouble=_text(fields, "trouble", LONGEST_CALL),
            **flags,
        )


def heard(said: Mapping[str, Any], ranks: int) -> dict[int, Answer]:
    """Return, by rank, the others' ends that a rank has heard of; raise ``ValueError`` for a malformed answer.

    ``said``: its answer. ``ranks``: how many there are.
    """
    return {number(rank, ranks): Answer.read(words) for rank, words in _dict(said.get("heard", {})).items()}


def number(rank: object, ranks: int) -> int:
    """Return ``rank``, a number or its digits, as a rank of ``ranks``; raise ``ValueError`` if it is none."""
    if isinstance(rank, bool) or not isinstance(rank, (int, str)) or len(str(rank)) > 9 or not 0 <= int(rank) < ranks:
        raise ValueError("no such rank")
    return int(rank)


@dataclass(frozen=True)
class Peer:
    """Address of a rank: its process, its port, and the token that questions need."""

    host: str  # the name of its machine
    pid: int  # of its process
    space: str = ""  # in which that number means this process: see :func:`space`
    address: str = ""  # where it listens
    port: int = 0
    token: str = ""  # which a question must have to be answered
    problem: str = ""  # why it cannot be reached; empty: it can

    @classmethod
    def read(cls, text: bytes) -> Peer:
        """Return a peer from the JSON of its fields; for any other ``text``, one that cannot be reached."""
        try:
            return cls._checked(json_object(text))
        except ValueError as error:
            return cls("", 0, problem=f"what it has said of itself cannot be read ({error})")

    @classmethod
    def _checked(cls, fields: Mapping[str, Any]) -> Peer:
        """Return a peer with ``fields``; raise ``ValueError`` where one is of another kind."""
        for name, most in (("pid", 1 << 32), ("port", PORTS)):
            value = fields.get(name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < most:
                raise ValueError(f"no {name}")
        texts = {name: _text(fields, name, LONGEST_NAME) for name in ("host", "space", "address", "token", "problem")}
        return cls(pid=fields["pid"], port=fields["port"], **texts)

    def with_problem(self, problem: str) -> Peer:
        """Return this peer with ``problem`` as why it cannot be reached; empty: it can."""
        return replace(self, problem=printable(problem, LONGEST_NAME))

    def runs(self, own: Peer) -> bool | None:
        """Return whether its process is there; None where that cannot be seen from the process ``own``.

        A process is seen from another one of its machine, outside of containers, and says nothing of a rank where ranks
        are threads.
        """
        if not self.space or self.space != own.space or self.pid == own.pid:
            return None
        try:
            with open(f"/proc/{self.pid}/stat", encoding="utf-8", errors="replace") as file:
                state = file.read().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        except (OSError, IndexError):
            return None
        return state not in "ZX"  # an ended process is there until its parent has asked for it


def space() -> str:
    """Return an identity of this machine's space of process numbers; empty where that cannot be known."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def json_object(text: bytes) -> dict[str, Any]:
    """Return the JSON object in ``text``; raise ``ValueError`` where there is none, or it is too deep to be ours."""
    try:
        return _dict(json.loads(text))
    except RecursionError:
        raise ValueError("too deep") from None


def _dict(value: object) -> dict[str, Any]:
    """Return ``value`` if it is a JSON object; raise ``ValueError`` if it is anything else."""
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value


def _text(fields: Mapping[str, Any], name: str, most: int) -> str:
    """Return a field as one printable line of at most ``most`` characters; raise ``ValueError`` if it is no text."""
    value = fields.get(name, "")
    if not isinstance(value, str):
        raise ValueError(f"{name} is no text")
    return printable(value, most)
