# SPDX-License-Identifier: Apache-2.0
"""Status of a rank: its activity, which completes errors, and its rows in the doctor's table.

A backend's handle notes which collective it waits for; an optimizer notes in which phase of which step it is. When a
wait fails, :func:`annotate` adds the step to the error. If ranks are processes, it
also adds the answers of the other ranks (:mod:`agmerge.runtime.peers.monitor`).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from agmerge.backends import open_files
from agmerge.errors import AGMergeError, NoAnswer

# The doctor's table, ``python -m agmerge doctor``: a backend hands over a program to be tried in a process of its own
# (``PROBE``), and makes a row of its result (``diagnose``).


@dataclass(frozen=True)
class ProbeResult:
    """Result of a probe."""

    facts: Mapping[str, object] = field(default_factory=dict)  # the JSON object that the probe has printed
    error: str = ""  # why there are no facts, in one line; empty: there are
    late: bool = False  # the probe ran out of time, so nothing is known


@dataclass(frozen=True)
class Row:
    """Line of the doctor's table: something that works, or does not."""

    kind: str  # "backend", "launcher", "speed" or "elastic": the first column
    name: str  # the second column
    works: bool
    detail: str  # versions and libraries where it works, else why it does not
    fix: str = ""  # the command that makes it work; empty where it does
    known: bool = True  # False: a check ran out of time, so ``works`` is False without evidence


def built_in(facts: Mapping[str, object]) -> str:
    """Return which of MPI, Gloo and NCCL are built into a library, for example ``"MPI, Gloo (no NCCL)"``.

    ``facts``: of its probe; libraries that they do not mention are left out.
    """
    names = {"mpi": "MPI", "gloo": "Gloo", "nccl": "NCCL"}
    present = [name for fact, name in names.items() if facts.get(fact)]
    absent = [name for fact, name in names.items() if fact in facts and not facts[fact]]
    return ", ".join(present or ["nothing"]) + (f" (no {', no '.join(absent)})" if absent else "")


# Activity of this rank.

MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")  # variables of MPI launchers
RANK_VARIABLES = ("RANK", "HOROVOD_RANK", *MPI_RANKS, "SLURM_PROCID")


@dataclass
class RankStatus:
    """Activity of one rank: the phase, its start, and the step."""

    phase: str = "is in its script, before the first step"  # in words, to be read after "rank 3" or "it"
    since: float = field(default_factory=time.monotonic)  # seconds of the monotonic clock: when the phase began
    step: int | None = None  # exchanges that it has committed; None: before the first step
    began: float = field(default_factory=time.monotonic)  # seconds of the same clock: when this step began
    call: str = ""  # the collective that it waits for, or waited for in vain; empty: none
    given_up: bool = False  # a wait has failed
    thread: int = 0  # identity of the thread that has entered the last phase of a step

    def enter(self, phase: str, step: int) -> None:
        """Record that this rank is now in ``phase`` ("is in a backward pass") of ``step``; peers are told so."""
        now = time.monotonic()
        if step != self.step:
            self.began = now
        self.phase, self.since, self.step = phase, now, step
        self.call, self.given_up = "", False
        self.thread = threading.get_ident()

    def end(self, phase: str) -> None:
        """Record that the script has ended, as ``phase`` says; step and thread stay those of the last step."""
        self.phase, self.since, self.call = phase, time.monotonic(), ""

    def wait_for(self, call: str) -> None:
        """Record that this rank waits for the collective ``call`` from now on."""
        self.phase, self.since, self.call = f"waits for {call}", time.monotonic(), call

    def resume(self, before: RankStatus) -> None:
        """Record that a wait is over, and that this rank goes on with what it did ``before``."""
        self.phase, self.since, self.call = before.phase, before.since, before.call

    def stop_at(self, call: str, error: AGMergeError) -> None:
        """Record that ``call`` has ended with ``error``: given up where there was no answer, else stopped."""
        gave_up = isinstance(error, NoAnswer)
        self.phase = f"has given up waiting for {call}" if gave_up else f"has stopped at {call}: {type(error).__name__}"
        self.since, self.given_up = time.monotonic(), self.given_up or gave_up

    def fail_at(self, call: str) -> float:
        """Record that there is no answer to ``call``; return for how many seconds it was waited for.

        A call that could not even start was waited for from now on: what was before it is no part of the wait.
        """
        now = time.monotonic()
        if self.call != call:
            self.since, self.call = now, call
        return now - self.since

    def describe(self) -> str:
        """Return phase and step for others to read, for example ``"is in a backward pass (step 5)"``."""
        return self.phase if self.step is None else f"{self.phase} (step {self.step})"


class StallWatch:
    """Watch of a rank's waits: one line on stderr for each that lasts 30 seconds, long before its time-out.

    A daemon thread looks at the status every few seconds, so a wait only asks whether the thread runs (below 1
    microsecond). ``status``: of the rank. ``after``:
    seconds of a wait until there is a line. ``every``: seconds between two looks. ``env``: says which rank this is.
    """

    def __init__(
        self, status: RankStatus, after: float = 30.0, every: float = 5.0, env: Mapping[str, str] = os.environ
    ) -> None:
        self._status, self._after, self._every, self._env = status, after, every, env
        self._thread: threading.Thread | None = None
        self._told: set[str] = set()  # calls that there was a line for

    def watch(self) -> None:
        """Start the thread, unless it runs. A forked child has none of its parent's threads, and starts its own."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._look, name="agmerge stalls", daemon=True)
            self._thread.start()

    def _look(self) -> None:
        while True:
            time.sleep(self._every)
            if line := self.line(time.monotonic()):
                sys.stderr.write(line)

    def line(self, now: float) -> str:
        """Return the line to print at ``now``, seconds of the monotonic clock; empty: there is nothing new to say."""
        status = replace(self._status)  # one state, which the rank does not change meanwhile
        waits = bool(status.call) and status.phase == f"waits for {status.call}"
        if not waits or now - status.since < self._after or status.call in self._told:
            return ""
        self._told.add(status.call)
        rank = next((f"rank {self._env[name]}" for name in RANK_VARIABLES if name in self._env), "this process")
        step = "" if status.step is None else f" in step {status.step}"
        return (
            f"agmerge: {rank} has waited {now - status.since:.0f} s for {status.call}{step}. All ranks must make this "
            "call: check that it is not inside `if rank() == 0`. The wait ends with an error at its time-out.\n"
        )


# (call, ranks) -> what is known of those ranks, as text, and which of them are missing from the call
PeerQuery = Callable[[str, Sequence[int]], tuple[str, tuple[int, ...]]]
_process = RankStatus()  # this process's; its threads share it, since autograd runs hooks on threads of its own
_stalls = StallWatch(_process)
_of_thread = threading.local()  # .status: that of one rank of an in-memory group; written by bind_thread alone
_peer_query: PeerQuery | None = None  # how to ask other processes; written by install_peer_query alone
_any_wait_failed = False  # whether a wait of this process has ever failed; written by _record_failed_wait alone


def current() -> RankStatus:
    """Return this rank's status: the process's, or the thread's where ranks are threads."""
    return getattr(_of_thread, "status", None) or _process


def bind_thread(is_rank: bool) -> None:
    """Give this thread a status of its own, as a rank of an in-memory group; False: it shares the process's again."""
    _of_thread.status = RankStatus() if is_rank else None


def install_peer_query(query: PeerQuery | None) -> None:
    """Install ``query(call, ranks)``, which runs when a wait of this process fails; None: no rank is asked."""
    global _peer_query
    _peer_query = query


def any_wait_failed() -> bool:
    """Return whether a wait of this process has ever failed: then to wait for other ranks at its end is in vain."""
    return _any_wait_failed


def reset() -> None:
    """Forget failed waits and how to ask other processes. For tests."""
    install_peer_query(None)
    _record_failed_wait(False)


def _record_failed_wait(failed: bool) -> None:
    """Keep for :func:`any_wait_failed` that a wait of this process has failed, or that none has."""
    global _any_wait_failed
    _any_wait_failed = failed


@contextmanager
def waiting_for(call: str, ranks: Sequence[int]) -> Iterator[None]:
    """Note around a wait that this rank waits for ``call``, and complete the error if the wait fails.

    ``call``: the name of a collective, such as ``"buffer 3"``. ``ranks``: of the world, those that take part; empty:
    all. The status goes back to what it was when the wait has succeeded.
    """
    status = current()
    before = replace(status)
    status.wait_for(call)
    if status is _process:
        _stalls.watch()
    try:
        yield
    except AGMergeError as error:
        if isinstance(error, NoAnswer):
            annotate(error, call, ranks)
        status.stop_at(call, error)
        raise
    else:
        status.resume(before)


def annotate(error: NoAnswer, call: str, ranks: Sequence[int]) -> None:
    """Write into ``error`` in which step this rank was, how long it waited, and the answers of the other ranks.

    ``call`` and ``ranks`` as those of :func:`waiting_for`. Asks other processes, which takes up to 2.5 seconds, and 4
    more where one of another machine refuses. Alone it says no more than whether too few files can be opened here.
    """
    if error.call:  # it was located where a thread of ours started the call
        return
    status = current()
    waited, answers, missing = status.fail_at(call), "", None
    if status is _process:
        _record_failed_wait(True)
        if _peer_query is not None:
            answers, missing = _peer_query(call, ranks)
        else:
            answers = open_files.advice(max(2, len(ranks)))
    error.locate(call, status.step, waited, answers, missing)
