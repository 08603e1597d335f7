# SPDX-License-Identifier: Apache-2.0
"""Records of an elastic job in its store, which any process that reaches the lighthouse may write.

A record that cannot be read counts as missing, whatever it holds: garbage, another version's format, a number without
bounds. No function here waits for a key, and none raises for what others have written.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Protocol

from agmerge.errors import printable
from agmerge.version import __version__

WORKERS, GENERATION = (
    "workers",
    "generation",
)  # keys: of the counter of workers; of a recent generation
ENDS, GOES = "ends", "goes"  # why a worker leaves: its script has ended; it was told to go
LARGEST = 10**9  # of a number of workers or generations: more than that is garbage
TRIES = 100  # to set a counter that others write, too
GAP = 64  # numbers without a record, after which no later one is looked for
LONGEST = 255  # characters of a name, an address, a token
MOST_WORDS = 10_000  # bytes of a record, or of a reason
MISSING = "\x01missing"  # no record has this value
REFUSED = "refused: "  # what the record of a refused worker begins with


class Store(Protocol):
    """Store of torch's, as far as it is used: ``TCPStore``, and in memory ``HashStore``."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number, and return it."""

    def compare_set(self, key: str, expected: str | bytes, desired: str, /) -> bytes:
        """Write ``desired`` if the value is ``expected``, or there is none; return the value of then."""


@dataclass(frozen=True)
class Worker:
    """Worker as others see it."""

    number: int  # in the order of arrival, from 1
    host: str  # its machine's name
    address: str  # at which others reach the store that it serves
    port: int
    token: str  # its own: tells it from one that came to a lighthouse that was started again
    version: str = __version__  # of its library


def unknown(number: int) -> Worker:
    """Return the stand-in for a worker with a record that cannot be read."""
    return Worker(number, "an unknown host", "", 0, "", "")


def words_of(worker: Worker) -> str:
    """Return a worker's record."""
    return json.dumps(asdict(worker))


def _worker_of(said: bytes | None, number: int) -> Worker | None:
    """Return the worker of a record; None if the record cannot be read, or is not of the worker of that number."""
    fields = _json(said)
    if not isinstance(fields, dict) or fields.keys() != set(Worker.__annotations__):
        return None
    texts = [fields[name] for name in ("host", "address", "token", "version")]
    plain = all(isinstance(one, str) and one.isprintable() and len(one) <= LONGEST for one in texts)
    port, own = fields["port"], fields["number"]
    is_worker = plain and type(port) is int and 0 < port < 1 << 16 and type(own) is int and own == number
    return Worker(**fields) if is_worker else None


def _json(said: bytes | None) -> object:
    """Return the value of a text in JSON; None if it is none."""
    if said is None or len(said) > MOST_WORDS * 10:
        return None
    try:
        return json.loads(said)
    except (ValueError, RecursionError):
        return None


def _number(said: bytes | None) -> int | None:
    """Return a number of workers or generations; None if it is none."""
    plain = said is not None and said.isdigit() and len(said) <= len(str(LARGEST))
    return int(said) if plain and said is not None and int(said) <= LARGEST else None


class JobStore:
    """Store of one job: typed access to its records."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._workers: dict[int, Worker] = {}  # by number: records that were read, which do not change

    def read(self, key: str) -> bytes | None:
        """Return a value; None if there is none. Unlike ``get`` of torch's, it waits for no key."""
        said = bytes(self._store.compare_set(key, MISSING, MISSING))
        return None if said == MISSING.encode() else said

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._store.set(key, value)

    def replace(self, key: str, said: bytes | None, value: str) -> None:
        """Write a value if it is still what was read, ``said``."""
        self._store.compare_set(key, said or "", value)

    # -- workers ------------------------------------------------------------------------------------------------------

    def count(self) -> int | None:
        """Return how many numbers were given to workers; None if that cannot be read."""
        said = self.read(WORKERS)
        return 0 if said is None else _number(said)

    def raise_count(self, least: int) -> None:
        """Make numbers up to ``least``, at least, count as given; a counter that cannot be read is set anew.

        Several workers may do so at once: the counter never exceeds what one of them knows.
        """
        for _ in range(TRIES):
            said = self.read(WORKERS)
            count = 0 if said is None else _number(said)
            if count is not None and count >= least:
                return
            self.replace(WORKERS, said, str(least if count is not None else self._last_recorded(least)))

    def next_number(self) -> int:
        """Give a number to a worker: the last one so far."""
        self.raise_count(0)
        return self._store.add(WORKERS, 1)

    def _last_recorded(self, number: int) -> int:
        """Return the last number with a record, from ``number`` on."""
        last = number
        while number - last < GAP:
            number += 1
            if self.read(f"worker/{number}") is not None:
                last = number
        return last

    def worker(self, number: int) -> Worker | None:
        """Return a worker; None if there is no record of it, or it cannot be read."""
        known = self._workers.get(number)
        if known is None:
            known = _worker_of(self.read(f"worker/{number}"), number)
            if known is not None:
                self._workers[number] = known
        return known

    def claim(self, worker: Worker) -> bool:
        """Write the record of a worker if none can be read; return whether it is the one that can be read now."""
        key = f"worker/{worker.number}"
        said = self.read(key)
        if _worker_of(said, worker.number) is None:
            self.replace(key, said, words_of(worker))
            said = self.read(key)
        return _worker_of(said, worker.number) == worker

    def why_strange(self, number: int) -> str:
        """Return why a worker cannot train with those of this version; empty: it can, or has no record."""
        said = self.read(f"worker/{number}")
        fields, read = _json(said), _worker_of(said, number)
        version = str(fields.get("version", "")) if isinstance(fields, dict) else ""
        if said is None or (read is not None and version == __version__):
            return ""
        if version in ("", __version__):
            return f"its record cannot be read by agmerge {__version__}, which the others run"
        return f"it runs agmerge {printable(version, LONGEST)}, and the others run {__version__}"

    def begin(self, worker: Worker) -> None:
        """Record that a worker has the job's state."""
        self.set(f"begun/{worker.number}", worker.token)

    def has_begun(self, number: int) -> bool:
        """Return whether a worker has the job's state."""
        said = self.read(f"begun/{number}")
        worker = self.worker(number) if said else None
        return worker is not None and said == worker.token.encode()

    def why_left(self, number: int) -> str:
        """Return why a worker has left; empty: it has not."""
        said = self.read(f"left/{number}")
        return next((why for why in (ENDS, GOES) if said == why.encode()), "")

    def refuse(self, number: int, why: str) -> None:
        """Tell a worker that it is not let in, and why."""
        self.set(f"refused/{number}", REFUSED + why)

    def why_refused(self, number: int) -> str:
        """Return why a worker is not let in; empty: it may be."""
        said = _words(self.read(f"refused/{number}"))
        return said.removeprefix(REFUSED) if said.startswith(REFUSED) else ""

    def steps(self, number: int) -> int:
        """Return how many exchanges a worker had made at its last sign of life; 0 if that is unknown."""
        return _number((self.read(f"beat/{number}") or b"").rpartition(b" ")[2]) or 0

    # -- generations --------------------------------------------------------------------------------------------------

    def decided(self, generation: int) -> list[int] | None:
        """Return the numbers of the members of a generation; None: it is not decided.

        A list of numbers of which no worker has a record is no decision.
        """
        members = _json(self.read(f"members/{generation}"))
        if not isinstance(members, list) or not all(type(one) is int and 0 < one <= LARGEST for one in members):
            return None
        if len(set(members)) < len(members) or not any(self.worker(one) for one in members):
            return None
        return list(members)

    def decide(self, generation: int, members: list[int]) -> None:
        """Decide on the members of a generation, unless that was done."""
        key = f"members/{generation}"
        said = self.read(key)
        if said is None or self.decided(generation) is None:
            self.replace(key, said, json.dumps(members))

    def latest(self) -> int:
        """Return a generation not later than the present one: not the first if the store was started again."""
        number = _number(self.read(GENERATION))
        return number if number and self.decided(number) else 1

    def why_broken(self, generation: int) -> str | None:
        """Return why a member has given a generation up; None: no member has."""
        return _words(self.read(f"broken/{generation}")) or None


def _words(said: bytes | None) -> str:
    """Return a text; empty if it is none."""
    if said is None or len(said) > MOST_WORDS:
        return ""
    try:
        return printable(said.decode())
    except UnicodeDecodeError:
        return ""
