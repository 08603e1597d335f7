# SPDX-License-Identifier: Apache-2.0
"""Membership of an elastic job: which workers there are, and which of them form the next generation.

All of it lies in one of torch's stores, which ``python -m agmerge lighthouse`` serves: each worker has a number there,
in the order of arrival, and raises a counter as long as it lives. A generation is decided by one ``compare_set``, so
there is one decision, even if two workers make it. Workers that cannot reach the store are in none: there are never
two trainings.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from agmerge.errors import AGMergeError, TooFewWorkers

POLL = 0.02  # seconds between two looks at the store
SILENT = 10.0  # seconds without a beat after which a job may count as dead, for newcomers, if nobody answers them
HURRY = 1.0  # seconds without a beat after which a worker that cannot be reached counts as lost, where others wait

ENDS, GOES = "ends", "goes"  # why a worker leaves: its script has ended; it was told to go
OVER = (
    "the job at this lighthouse has ended: its workers have come to their ends. A lighthouse serves one job: start "
    "another one for the next, or the same anew"
)


class Store(Protocol):
    """Store of torch's, as far as it is used: ``TCPStore``, and in memory ``HashStore``."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""

    def get(self, key: str, /) -> bytes:
        """Return a value; wait for one."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number, and return it."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys are there."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Write ``desired`` where the value is ``expected``, or there is none; return the value of then."""


@dataclass(frozen=True)
class Worker:
    """Worker as others see it."""

    number: int  # in the order of arrival, from 1
    host: str  # its machine's name
    address: str  # at which others reach the store that it serves
    port: int
    token: str  # its own: tells it from one that came to a lighthouse that was started again


@dataclass(frozen=True)
class Generation:
    """Workers that train together, from a change to the next one."""

    number: int  # from 1
    members: tuple[Worker, ...]  # in the order of their ranks: the oldest first
    own: int  # this worker's rank
    newcomers: tuple[int, ...]  # ranks of those that were not in the generation before


class Membership:
    """One worker's place in an elastic job.

    ``store``: of the whole job. ``own``: this worker; its number is given here. ``least``: workers without which none
    trains. ``answers``: whether a worker can be reached. ``suspect``: seconds without a beat after which one that can
    be reached counts as lost, too: its machine is busy, or it was stopped. ``now``: a clock, in seconds.
    """

    def __init__(
        self,
        store: Store,
        host: str,
        address: str,
        port: int,
        least: int,
        answers: Callable[[Worker], bool],
        suspect: float = HURRY,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._least, self._answers, self._now = store, least, answers, now
        self._suspect = suspect
        self._leaves = self._has_begun = False
        self.own = Worker(0, host, address, port, secrets.token_hex(8))
        self._arrive()
        # By number: a worker's last beat, since when nothing newer has been seen, and when it was last looked for.
        self._seen: dict[int, tuple[bytes, float, float]] = {}
        self._reached: dict[int, tuple[float, bool]] = {}  # of silent ones: when one was tried, and whether it answered
        self._arrived = 0  # workers that had come when the present generation began

    def _arrive(self) -> None:
        """Take a number, the last one so far."""
        self.own = replace(self.own, number=self._store.add("workers", 1))
        self._store.set(f"worker/{self.own.number}", self._words)
        self.beat()

    @property
    def _words(self) -> str:
        return json.dumps(asdict(self.own))

    def reconnect(self, store: Store, present: Generation) -> None:
        """Use another connection to the store, which may have been started again, empty.

        Says there who this worker is, and ``present``, its generation, so that newcomers find it. Raises
        :class:`agmerge.AGMergeError` where another job has begun there meanwhile.
        """
        self._store, number = store, self.own.number
        while store.add("workers", 0) < max(number, self._arrived):
            store.add("workers", 1)
        first = store.compare_set(f"worker/{number}", "", self._words).decode()
        present_numbers = json.dumps([one.number for one in present.members])
        decided = store.compare_set(f"members/{present.number}", "", present_numbers).decode()
        if (first, decided) != (self._words, present_numbers):
            raise AGMergeError(
                "the lighthouse was started again, and other workers have begun to train there, without this one. End "
                "one of the two jobs: the workers of this one can be started again, as newcomers of the other"
            )
        store.set("generation", str(present.number))
        if self._has_begun:
            self.begin()

    # -- signs of life ------------------------------------------------------------------------------------------------

    def beat(self) -> None:
        """Say that this worker lives."""
        self._store.add(f"beat/{self.own.number}", 1)

    def silence(self, number: int) -> float:
        """Return for how many seconds no new beat of a worker has been seen here; 0 at the first look.

        Of a time in which this worker has not looked ``HURRY`` seconds count: it has had no processor, or the store has
        not answered, and others are not lost for that.
        """
        key = f"beat/{number}"
        beat = self._store.get(key) if self._store.check([key]) else b""
        now = self._now()
        before, since, looked = self._seen.get(number, (None, now, now))
        since = now if beat != before else since + max(now - looked - HURRY, 0.0)
        self._seen[number] = (beat, since, now)
        return now - since

    def leave(self, why: str = ENDS) -> None:
        """Record in the store that this worker is in no later generation; a :meth:`next` under way raises."""
        self._leaves = True
        self._store.set(f"left/{self.own.number}", why)

    def begin(self) -> None:
        """Record in the store that this worker has the job's state: it trains."""
        self._has_begun = True
        self._store.set(f"begun/{self.own.number}", "")

    def has_left(self, number: int) -> bool:
        """Return whether a worker has said that it leaves."""
        return self._store.check([f"left/{number}"])

    # -- the present generation ---------------------------------------------------------------------------------------

    def give_up(self, generation: int, why: str) -> None:
        """Say that a generation has broken: all of its members are to form the next one."""
        self._store.set(f"broken/{generation}", why)

    def why_given_up(self, generation: int) -> str | None:
        """Return why a member has given a generation up; None: no member has."""
        key = f"broken/{generation}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def newcomers_wait(self) -> bool:
        """Return whether workers have come since the present generation began, and live."""
        return bool(self._waiting(()))

    # -- the next one -------------------------------------------------------------------------------------------------

    def next(self, before: Generation | None, patience: float, *, lets_in: bool) -> Generation:
        """Collective. Return the next generation, once it is decided.

        Args:

            before: this worker's generation; None: it has none, and waits to be let in.
            patience: seconds, after which :class:`TooFewWorkers` is raised.
            lets_in: newcomers may be in it, where there is a generation already, and it has at least as many workers
                as train; all members say the same. False: all that are left, to end a step among themselves.
        """
        end = self._now() + patience
        if before is None:
            return self._join(end)
        number = before.number + 1
        self._store.set(f"asks/{number}/{self.own.number}", "")
        while (decided := self._decided(number)) is None:
            living = [one.number for one in before.members if self._lives(one.number, number)]
            asking = [one for one in living if self._store.check([f"asks/{number}/{one}"])]
            if asking == living and asking and asking[0] == self.own.number:
                known = [one.number for one in before.members]
                if not self._keeps_state(known, asking):
                    self._pause(end, len(living))
                    continue
                new = self._waiting(known) if lets_in else []
                if not lets_in or len(asking) + len(new) >= self._least:
                    self._decide(number, [*asking, *new])
            self._pause(end, len(living))
        return self._generation(number, decided, [one.number for one in before.members])

    def _join(self, end: float) -> Generation:
        """Return the first generation that this worker is in."""
        number, came, since = self._latest(), 0, self._now()
        looked, over = since - HURRY, False  # at the workers of the job, and whether it is over
        while True:
            while (decided := self._decided(number)) is not None:
                if self.own.number in decided:
                    earlier = self._decided(number - 1) or []
                    return self._generation(number, decided, earlier)
                if self.own.number < max(decided):  # it was silent just then, and is looked for no more
                    self._arrive()
                number, over = number + 1, False
            number = max(number, self._latest())
            before = self._decided(number - 1) or []
            if over or self._now() - looked >= HURRY / 2:
                looked, over = self._now(), self._is_over(before)
            if over:  # none trains: the first of those that are there decides, once no other comes
                there = self._waiting(before)
                if len(there) != came:
                    came, since = len(there), self._now()
                if there[0] == self.own.number and len(there) >= self._least and self._now() - since >= HURRY:
                    self._decide(number, there)
            self._pause(end, came or len(before))

    def _is_over(self, members: Sequence[int]) -> bool:
        """Return whether none of ``members`` trains any more: they were told to go, or are dead.

        Raises :class:`agmerge.AGMergeError` where their scripts have ended: newcomers would begin it all again.
        """
        left = {one: self._store.get(f"left/{one}").decode() for one in members if self.has_left(one)}
        if not self._are_dead([one for one in members if one not in left]):
            return False
        if ENDS in left.values():
            raise AGMergeError(OVER)
        return True

    def _are_dead(self, members: Sequence[int]) -> bool:
        """Return whether none of ``members`` has given a sign of life for long, nor answers."""
        silences = [self.silence(one) for one in members]  # of all: each is counted from the first look on
        return min(silences, default=SILENT + 1) > SILENT and not any(
            self._answers(self._worker(one)) for one in members
        )

    def _keeps_state(self, members: Sequence[int], asking: Sequence[int]) -> bool:
        """Return whether one of ``asking`` has the state of the job, or all of ``members`` that have it are gone.

        Newcomers that are only just let in do not wait for them as shortly as others do: they would begin anew.
        """
        begun = [one for one in members if self._store.check([f"begun/{one}"]) and not self.has_left(one)]
        return not begun or any(one in asking for one in begun) or self._are_dead(begun)

    def _latest(self) -> int:
        """Return a generation not later than the present one: not the first where the store was started again."""
        return int(self._store.get("generation")) if self._store.check(["generation"]) else 1

    def _decide(self, number: int, members: Sequence[int]) -> None:
        self._store.compare_set(f"members/{number}", "", json.dumps(list(members)))

    def _decided(self, number: int) -> list[int] | None:
        key = f"members/{number}"
        members: list[int] | None = json.loads(self._store.get(key)) if self._store.check([key]) else None
        return members

    def _lives(self, number: int, generation: int) -> bool:
        """Return whether a member is to be waited for: it asks for the generation, or has beaten a moment ago."""
        if self.has_left(number):
            return False
        return number == self.own.number or not self.is_lost(number)

    def is_lost(self, number: int) -> bool:
        """Return whether a worker that others wait for counts as lost: silent and unreachable, or silent for long.

        A process that is dead refuses connections at once; one that has got no time of a busy processor accepts them.
        """
        silence = self.silence(number)
        if silence < HURRY:
            self._reached.pop(number, None)
            return False
        asked, answers = self._reached.get(number, (-HURRY, True))
        if silence < self._suspect and self._now() - asked >= HURRY / 2:
            # After the lighthouse was started again only those are known there that live.
            is_known = self._store.check([f"worker/{number}"])
            asked, answers = self._reached[number] = self._now(), is_known and self._answers(self._worker(number))
        return silence >= self._suspect or not answers

    def _waiting(self, known: Collection[int]) -> list[int]:
        """Return the numbers of workers that live and are in no generation; ``known``: those of this one."""
        first = max(self._arrived, max(known, default=0)) + 1
        come = range(first, self._store.add("workers", 0) + 1)
        return [one for one in come if one == self.own.number or (not self.has_left(one) and self.silence(one) < HURRY)]

    def _generation(self, number: int, decided: Sequence[int], before: Sequence[int]) -> Generation:
        self._arrived = max(self._arrived, *decided)
        if self.own.number not in decided:
            raise AGMergeError(
                f"the other workers go on without this one, number {self.own.number}: it gave no sign of life when "
                "they formed a group. Start it again: it comes back as a newcomer. If it was only busy, raise suspect="
            )
        members = tuple(map(self._worker, decided))
        new = tuple(rank for rank, one in enumerate(decided) if one not in before)
        return Generation(number, members, list(decided).index(self.own.number), new)

    def _worker(self, number: int) -> Worker:
        return Worker(**json.loads(self._store.get(f"worker/{number}")))

    def _pause(self, end: float, there: int) -> None:
        if self._leaves:
            raise AGMergeError("this worker leaves its elastic job: it is in no new group")
        if self._now() > end:
            raise TooFewWorkers(
                f"an elastic job of at least {self._least} workers has had {there} for longer than it waits "
                "(patience=). What is in memory can be saved; start more workers, or lower min_workers"
            )
        time.sleep(POLL)
