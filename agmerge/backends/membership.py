# SPDX-License-Identifier: Apache-2.0
"""Membership of an elastic job: which workers there are, and which of them form the next generation.

All of it lies in one of torch's stores, which ``python -m agmerge lighthouse`` serves: each worker has a number there,
in the order of arrival, and raises a counter as long as it lives. A generation is decided by one ``compare_set``, so
there is one decision, even if two workers make it. Workers that cannot reach the store are in none: there are never
two trainings.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from agmerge.backends.job_store import ENDS as ENDS
from agmerge.backends.job_store import GENERATION, JobStore, Store, Worker, unknown
from agmerge.backends.job_store import GOES as GOES
from agmerge.errors import AGMergeError, TooFewWorkers

POLL = 0.02  # seconds between two looks at the store
SILENT = 10.0  # seconds without a beat after which a job may count as dead, for newcomers, if nobody answers them
HURRY = 1.0  # seconds without a beat after which a worker that cannot be reached counts as lost, where others wait

NEWEST = 1024  # workers that are looked at for newcomers, at most: the last ones that have come
OVER = (
    "AGM217: The job of this lighthouse has finished. A lighthouse serves one job: restart it before you start the "
    "next job."
)


HELD = (
    "worker {number} on {host} has given no sign of life for {seconds:g} s, but {address}, port {port}, which served "
    "its group, accepts connections. The worker cannot reach the lighthouse, is stopped, or left a child process that "
    "holds its socket. Find it with `ss -ltnp 'sport = :{port}'` on that host, and end it"
)
STRANGE = "worker {number} cannot join: {why}"
REFUSED = (
    "AGM710: This worker, number {number}, cannot join the elastic job: {why}. Install the same version of agmerge on "
    "all machines, and restart it."
)
LOST = "AGM711: The last worker with the state of this elastic job failed, after about {steps} steps"
NO_RESTART = (
    LOST + ", and restart=False. To resume from a checkpoint, restart the lighthouse. To start training again "
    "automatically, remove restart=."
)
RESTART = (
    LOST + ". Training starts from the beginning, unless your script loads a checkpoint. To raise an error "
    "instead, call init() with elastic=agmerge.Elastic(restart=False)"
)


@dataclass(frozen=True)
class Generation:
    """Workers that train together, from a change to the next one."""

    number: int  # from 1
    members: tuple[Worker, ...]  # in the order of their ranks: the oldest first
    own: int  # this worker's rank
    newcomers: tuple[int, ...]  # ranks of those that were not in the generation before
    lost_steps: int | None = None  # exchanges of the job, of which no member has the state; None: nothing is lost


class Membership:
    """One worker's place in an elastic job.

    ``store``: of the whole job. ``own``: this worker; its number is given here. ``least``: workers without which none
    trains. ``answers``: whether a worker can be reached. ``suspect``: seconds without a beat after which one that can
    be reached counts as lost, too: its machine is busy, or it was stopped. ``now``: a clock, in seconds. ``restart``:
    training may begin again where no worker is left that has the job's state. ``tell``: writes a line for people.
    ``first``: workers without which the first generation does not begin.
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
        restart: bool = True,
        tell: Callable[[str], None] = lambda _: None,
        first: int = 0,
    ) -> None:
        self._first = first
        self._store, self._least, self._answers, self._now = JobStore(store), least, answers, now
        self._suspect, self._restart, self._tell = suspect, restart, tell
        self._leaves = self._has_begun = False
        self._beats = self._steps = 0
        self._restored = -HURRY  # when records were last looked at that others may have damaged
        self.own = Worker(0, host, address, port, secrets.token_hex(8))
        self._is_oldest = False  # of its generation
        self._refused: set[int] = set()  # numbers of workers that this one has refused
        self._held = ""  # why a job without signs of life does not count as dead; empty: it does, or lives
        self._arrive()
        # By number: a worker's last beat, since when nothing newer has been seen, and when it was last looked for.
        self._seen: dict[int, tuple[bytes, float, float]] = {}
        self._reached: dict[int, tuple[float, bool]] = {}  # of silent ones: when one was tried, and whether it answered
        self._arrived = 0  # workers that had come when the present generation began

    def _arrive(self) -> None:
        """Take a number, the last one so far."""
        is_there = False
        while not is_there:  # until the number is one for which nothing was written by others
            self.own = replace(self.own, number=self._store.next_number())
            is_there = self._store.claim(self.own)
        self.beat(self._steps)

    def reconnect(self, store: Store, present: Generation) -> None:
        """Use another connection to the store, which may have been started again, empty.

        Records there who this worker is, and ``present``, its generation, so that newcomers find it. All workers of a
        generation may do so at once. Raises :class:`agmerge.AGMergeError` where another job has begun there meanwhile.
        """
        self._store = JobStore(store)
        self._store.raise_count(max(self.own.number, self._arrived))
        numbers = [one.number for one in present.members]
        is_own = self._store.claim(self.own)
        self._store.decide(present.number, numbers)
        if not is_own or self._store.decided(present.number) != numbers:
            raise AGMergeError(
                "AGM215: The lighthouse was restarted, and other workers started to train without this one. End one "
                "of the two jobs, and restart its workers, which then join the other."
            )
        self._store.set(GENERATION, str(present.number))
        if self._has_begun:
            self.begin()

    def restore(self, present: Generation) -> None:
        """Write again what others have damaged of this worker's records, and of those of ``present``, its generation.

        Newcomers that could not read them would take the job for dead. Nothing happens soon after the last time.
        """
        store, now = self._store, self._now()
        if now - self._restored < HURRY / 2:
            return
        self._restored = now
        store.raise_count(max(self.own.number, self._arrived))
        store.claim(self.own)
        store.decide(present.number, [one.number for one in present.members])
        if store.latest() < present.number:
            store.set(GENERATION, str(present.number))
        if self._has_begun and not store.has_begun(self.own.number):
            self.begin()

    # -- signs of life ------------------------------------------------------------------------------------------------

    def beat(self, steps: int = 0, store: Store | None = None) -> None:
        """Record that this worker lives, and has made so many ``steps``. ``store``: another connection to the same."""
        self._beats, self._steps = self._beats + 1, steps
        (store or self._store).set(f"beat/{self.own.number}", f"{self.own.token} {self._beats} {steps}")

    def silence(self, number: int) -> float:
        """Return for how many seconds no new beat of a worker has been seen here; 0 at the first look.

        Of a time in which this worker has not looked ``HURRY`` seconds count: it has had no processor, or the store has
        not answered, and others are not lost for that.
        """
        now = self._now()  # before the look: what has passed until the store has answered is no silence
        beat = self._store.read(f"beat/{number}") or b""
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
        self._store.begin(self.own)

    def has_left(self, number: int) -> bool:
        """Return whether a worker has announced that it leaves."""
        return bool(self._store.why_left(number))

    # -- the present generation ---------------------------------------------------------------------------------------

    def give_up(self, generation: int, why: str) -> None:
        """Record that a generation has broken: all of its members are to form the next one."""
        self._store.set(f"broken/{generation}", why)

    def why_given_up(self, generation: int) -> str | None:
        """Return why a member has given a generation up; None: no member has."""
        return self._store.why_broken(generation)

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
        while (decided := self._store.decided(number)) is None:
            self.restore(before)
            living = [one.number for one in before.members if self._lives(one.number)]
            asking = [one for one in living if self._store.read(f"asks/{number}/{one}") is not None]
            if asking == living and asking and asking[0] == self.own.number:
                known = [one.number for one in before.members]
                if not self._keeps_state(known, asking):
                    self._pause(end, len(living))
                    continue
                new = self._waiting(known) if lets_in else []
                if not lets_in or len(asking) + len(new) >= self._least:
                    self._store.decide(number, [*asking, *new])
            self._pause(end, len(living))
        return self._generation(number, decided, [one.number for one in before.members])

    def _join(self, end: float) -> Generation:
        """Return the first generation that this worker is in."""
        number, came, since = self._store.latest(), 0, self._now()
        looked, over = since - HURRY, False  # at the workers of the job, and whether it is over
        while True:
            if why := self._store.why_refused(self.own.number):
                raise AGMergeError(REFUSED.format(number=self.own.number, why=why))
            while (decided := self._store.decided(number)) is not None or self._store.decided(number + 1):
                if decided is not None and self.own.number in decided:
                    return self._generation(number, decided, self._store.decided(number - 1) or [])
                if decided is not None and self.own.number < max(decided):  # it was silent then: none looks for it now
                    self._arrive()
                number, over = number + 1, False
            number = max(number, self._store.latest())
            before = self._store.decided(number - 1) or []
            if over or self._now() - looked >= HURRY / 2:
                looked, over = self._now(), self._is_over(before)
            if over:  # none trains: the first of those that are there decides, once no other comes
                there = self._waiting(before)
                if len(there) != came:
                    came, since = len(there), self._now()
                least = self._least if before else max(self._least, self._first)
                if there[0] == self.own.number and len(there) >= least and self._now() - since >= HURRY:
                    self._lost_steps(there)
                    self._store.decide(number, there)
            self._pause(end, came or len(before))

    def _is_over(self, members: Sequence[int]) -> bool:
        """Return whether none of ``members`` trains any more: they were told to go, or are dead.

        The same is asked of all that have had the job's state: what is said of members may be damaged. Raises
        :class:`agmerge.AGMergeError` where their scripts have ended: newcomers would begin it all again.
        """
        left = {one: self._store.why_left(one) for one in {*members, *self._trained()}}
        if not self._are_dead([one for one in left if not left[one]]):
            return False
        if ENDS in [left[one] for one in members]:
            raise AGMergeError(OVER)
        return True

    def _trained(self) -> list[int]:
        """Return the numbers of workers that have, or had, the job's state."""
        return [one for one in self._newest(1) if one != self.own.number and self._store.has_begun(one)]

    def _lost_steps(self, members: Sequence[int]) -> int | None:
        """Return how many exchanges are lost where a generation has these members; None: one has the job's state.

        Raises :class:`agmerge.AGMergeError` where this worker is not to begin again.
        """
        if any(map(self._store.has_begun, members)):
            return None
        steps = max(map(self._store.steps, self._trained()), default=None)
        if steps is not None and not self._restart:
            raise AGMergeError(NO_RESTART.format(steps=steps))
        return steps

    def _are_dead(self, members: Sequence[int]) -> bool:
        """Return whether none of ``members`` has given a sign of life for long, nor answers."""
        silences = [self.silence(one) for one in members]  # of all: each is counted from the first look on
        if min(silences, default=SILENT + 1) <= SILENT:
            return False
        there = next((one for one in map(self._store.worker, members) if one and self._answers(one)), None)
        if there is not None and not self._held:
            fields = {name: getattr(there, name) for name in ("number", "host", "address", "port")}
            self._held = HELD.format(seconds=SILENT, **fields)
            self._tell(self._held)
        return there is None

    def _keeps_state(self, members: Sequence[int], asking: Sequence[int]) -> bool:
        """Return whether one of ``asking`` has the state of the job, or all of ``members`` that have it are gone.

        Newcomers that are only just let in do not wait for them as shortly as others do: they would begin anew.
        """
        begun = [one for one in members if self._store.has_begun(one) and not self.has_left(one)]
        return not begun or any(one in asking for one in begun) or self._are_dead(begun)

    def _lives(self, number: int) -> bool:
        """Return whether a member is to be waited for: it is this worker, or has beaten a moment ago."""
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
            worker = self._store.worker(number)
            asked, answers = self._reached[number] = self._now(), worker is not None and self._answers(worker)
        return silence >= self._suspect or not answers

    def _newest(self, first: int) -> Iterable[int]:
        """Return numbers that were given to workers, from ``first`` on; of very many the last ones."""
        count = self._store.count() or 0
        return range(max(first, count - NEWEST + 1), count + 1)

    def _waiting(self, known: Collection[int]) -> list[int]:
        """Return the numbers of workers that live and are in no generation; ``known``: those of this one.

        Those without a record, or with another version's, are none; the latter are refused by the oldest.
        """
        first = max(self._arrived, max(known, default=0)) + 1
        others = [one for one in self._newest(first) if one != self.own.number and not self.has_left(one)]
        there = [one for one in others if self.silence(one) < HURRY and self._fits(one)]
        return sorted([*there, self.own.number] if self.own.number >= first else there)

    def _fits(self, number: int) -> bool:
        """Return whether a newcomer has a record of this version; else refuse it."""
        why = self._store.why_strange(number)
        if why and self._is_oldest and number not in self._refused:
            self._refused.add(number)
            self._store.refuse(number, why)
            self._tell(STRANGE.format(number=number, why=why))
        return not why and self._store.worker(number) is not None

    def _generation(self, number: int, decided: Sequence[int], before: Sequence[int]) -> Generation:
        self._arrived = max(self._arrived, *decided)
        if self.own.number not in decided:
            raise AGMergeError(
                f"AGM210: The other workers continued without this one, number {self.own.number}, because it gave no "
                "sign of life when they formed a group. Restart it to join again. If it was only busy, raise suspect=."
            )
        lost = self._lost_steps(decided)
        members = tuple(self._store.worker(one) or unknown(one) for one in decided)
        new = tuple(rank for rank, one in enumerate(decided) if one not in before)
        own = list(decided).index(self.own.number)
        self._is_oldest = own == 0
        return Generation(number, members, own, new, lost)

    def _pause(self, end: float, there: int) -> None:
        if self._leaves:
            raise AGMergeError("AGM216: This worker is leaving its elastic job, so it cannot join a new group.")
        if self._now() > end:
            raise TooFewWorkers(
                f"AGM209: The elastic job requires at least {self._least} workers, but had {there} for longer than "
                "patience=. Save your state if necessary, then start more workers, or lower min_workers"
                + (f". {self._held}" if self._held else "")
            )
        time.sleep(POLL)
