"""Where this rank is in its script, and what an error says when another rank is missing.

A backend's handle notes what it waits for; an optimizer, in which step. When a wait fails its error is told the step
and, where ranks are processes, the answers to a roll call (:mod:`agmerge.runtime.peers.monitor`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from agmerge.errors import AGMergeError, NoAnswer


@dataclass
class RankStatus:
    """What a rank does, in words, since when (monotonic seconds), in which step (committed exchanges so far).

    ``call``: the collective that it waits for, or waited for in vain (``given_up``); empty: none.
    """

    doing: str = "is in its script, before the first step"
    since: float = field(default_factory=time.monotonic)
    step: int | None = None
    call: str = ""
    given_up: bool = False
    thread: int = 0  # that of its last step

    def move(self, step: int, doing: str) -> None:
        """It goes on with something else."""
        self.doing, self.since, self.step = doing, time.monotonic(), step
        self.call, self.given_up = "", False
        self.thread = threading.get_ident()

    def words(self) -> str:
        """For others to read."""
        return self.doing if self.step is None else f"{self.doing} (step {self.step})"


Ask = Callable[[str, Sequence[int]], tuple[str, tuple[int, ...]]]

ask: Ask | None = None  # (call, ranks) -> what is known of those ranks, and which of them are missing
lost = False  # whether a wait of this process has ever failed

_process = RankStatus()  # also of the threads on which autograd runs hooks
_thread = threading.local()


def here() -> RankStatus:
    """This rank's: the process's, or the thread's where ranks are threads."""
    return getattr(_thread, "place", None) or _process


def separate(yes: bool) -> None:
    """Whether this thread is a rank by itself, of an in-memory group."""
    _thread.place = RankStatus() if yes else None


@contextmanager
def waiting(call: str, ranks: Sequence[int]) -> Iterator[None]:
    """Around a wait for the collective ``call`` of ``ranks`` (of the world; empty: all)."""
    place = here()
    doing, since, before = place.doing, place.since, place.call
    place.doing, place.since, place.call = f"waits for {call}", time.monotonic(), call
    try:
        yield
    except NoAnswer as error:
        explain(error, call, ranks)
        place.doing, place.since, place.given_up = f"has given up waiting for {call}", time.monotonic(), True
        raise
    except AGMergeError as error:
        place.doing, place.since = f"has stopped at {call}: {type(error).__name__}", time.monotonic()
        raise
    else:
        place.doing, place.since, place.call = doing, since, before


def explain(error: NoAnswer, call: str, ranks: Sequence[int]) -> None:
    """Put into ``error`` where this rank was, and what others say."""
    global lost
    place, text = here(), str(error)
    error.call, error.step = call, place.step
    error.waited = time.monotonic() - place.since if place.call == call else 0.0
    place.call = call
    if place.step is not None:
        text += f" (in step {place.step}, after {error.waited:.1f} s)"
    if place is _process:
        lost = True
        if ask is not None:
            said, error.missing = ask(call, ranks)
            text += f". {said}".rstrip(".")
    text += f". {error.advice}" if error.advice else ""
    error.args = (f"{text} ({error.words})" if error.words else text,)


@contextmanager
def starting(call: str, ranks: Sequence[int]) -> Iterator[None]:
    """Around the start of a collective, which fails where an earlier one has."""
    try:
        yield
    except NoAnswer as error:
        explain(error, call, ranks)
        raise
