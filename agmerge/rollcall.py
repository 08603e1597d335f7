"""Which ranks are still there, and where: asked when a wait has failed, whatever the backend.

Every process listens at a port of its own, where a thread says what the script does. Addresses, ports and tokens are
gathered when a process joins the others. A rank that misses one asks all of them at once, and tells them that it gives
up: those that miss it later know that it was not the first.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from agmerge import addresses, whereabouts
from agmerge.backends import Backend
from agmerge.errors import NoAnswer
from agmerge.handshake import gather_texts
from agmerge.listening import PATIENCE, STUCK, Listener, Silence, ask
from agmerge.whereabouts import Place

SHOWN = 8  # ranks that are described; more are only named
FIRST = 10.0  # seconds, for the first question of all: a machine that starts many processes is busy
TEXT = 1000  # characters of an error that is told

_current: RollCall | None = None


@dataclass(frozen=True)
class Peer:
    """How to reach a rank. ``problem``: why it cannot be."""

    host: str
    pid: int
    address: str = ""
    port: int = 0
    token: str = ""
    problem: str = ""


class RollCall:
    """The ranks of ``world``, which are processes, and what they have told. Collective."""

    def __init__(self, world: Backend, timeout: float, place: Place) -> None:
        self.rank, self._place = world.rank, place
        self._told: dict[int, dict[str, Any]] = {}  # by rank: what it has said unasked, the last thing
        self._listener: Listener | None = None
        mine = (socket.gethostname(), addresses.network())
        known = [tuple(json.loads(text)) for text in gather_texts(world, _json(mine), "roll call/hosts", timeout)]
        own = self._listen(None if len(set(known)) > 1 else "127.0.0.1", [host for host, _ in known if host != mine[0]])
        ports = gather_texts(world, _json(asdict(own)), "roll call/ports", timeout)
        self.peers = [Peer(**json.loads(text)) for text in ports]
        self._check(world, timeout)

    def _listen(self, address: str | None, hosts: Sequence[str]) -> Peer:
        own = Peer(socket.gethostname(), os.getpid(), token=secrets.token_hex(16))
        try:
            address = address or addresses.reachable(hosts, os.environ)
            self._listener = Listener(address, own.token, self._answer)
        except OSError as error:
            return replace(own, problem=f"it has no port to be asked at ({error})")
        return replace(own, address=address, port=self._listener.port)

    def _check(self, world: Backend, timeout: float) -> None:
        """Ask the next rank once now: what cannot be reached cannot be told from what has ended."""
        following = (self.rank + 1) % world.size
        why = self.peers[following].problem
        if not why:
            try:
                self._ask(following, {}, FIRST)
            except Silence as silence:
                peer = self.peers[following]
                why = f"it could not be asked at {peer.address}, port {peer.port}, from the start ({silence})"
        for rank, said in enumerate(gather_texts(world, why.encode(), "roll call/check", timeout)):
            after = (rank + 1) % world.size
            self.peers[after] = replace(self.peers[after], problem=said.decode())

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked.get("says"):
            self._told[int(asked["rank"])] = dict(asked["says"])
        return self._own()

    def _own(self) -> dict[str, Any]:
        place = self._place
        seconds = time.monotonic() - place.since
        at = {"call": place.call, "step": place.step, "given_up": place.given_up}
        return {"words": place.words(), "seconds": seconds, **at}

    def _ask(self, rank: int, says: dict[str, Any], patience: float = PATIENCE) -> dict[str, Any]:
        peer = self.peers[rank]
        return ask(peer.address, peer.port, peer.token, {"rank": self.rank, "says": says}, patience)

    def tell(self, says: dict[str, Any], ranks: Sequence[int] = ()) -> dict[int, dict[str, Any] | Silence]:
        """Say something to ``ranks`` (none given: all), at once; what each answers, or what its silence means."""
        answers: dict[int, dict[str, Any] | Silence] = {}

        def one(rank: int) -> None:
            try:
                answers[rank] = self._ask(rank, says)
            except Silence as silence:
                answers[rank] = silence

        others = [rank for rank in ranks or range(len(self.peers)) if rank != self.rank]
        threads = [
            threading.Thread(target=one, args=(rank,), daemon=True) for rank in others if not self.peers[rank].problem
        ]
        end = time.monotonic() + 2 * PATIENCE + 0.5
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        return {rank: answers.get(rank, Silence(STUCK)) for rank in others if not self.peers[rank].problem}

    def call(self, call: str, ranks: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """Who of ``ranks`` is missing from the collective ``call``: as text, and by number."""
        own = self._own()
        given_up = replace(self._place, doing=f"has given up waiting for {call}").words()
        missing: dict[int, str] = {}
        waiting: dict[int, str] = {}
        for rank, answer in self.tell({**own, "words": given_up, "given_up": True}, ranks).items():
            last = self._told.get(rank)
            if isinstance(answer, Silence):
                text = str(answer) if last is None else f"it {last['words']}; {answer}"
            else:
                last, text = answer, f"it {answer['words']}, for {answer['seconds']:.1f} s"
            # Who has given up, wherever that was, was not the first to be missing.
            there = last is not None and (last["given_up"] or (last["call"], last["step"]) == (call, own["step"]))
            (waiting if there else missing)[rank] = text
        unknown = {rank: peer.problem for rank, peer in enumerate(self.peers) if rank in (ranks or [rank])}
        unknown = {rank: why for rank, why in unknown.items() if why and rank != self.rank}
        found = {"Missing": missing, "Not known": unknown, "Waiting too": waiting}
        said = [f"{title}: {self._listed(of)}." for title, of in found.items() if of]
        if not missing and not unknown:
            said.append("Nobody is missing: the network or the backend is stuck.")
        return " ".join(said), tuple(missing)

    def _listed(self, of: dict[int, str]) -> str:
        shown = [
            f"rank {rank} (host {self.peers[rank].host}, pid {self.peers[rank].pid}): {text}"
            for rank, text in list(of.items())[:SHOWN]
        ]
        more = [str(rank) for rank in list(of)[SHOWN:]]
        return "; ".join(shown + ([f"and ranks {', '.join(more)}"] if more else []))

    def raised(self, error: BaseException) -> None:
        """The script ends with ``error``: let those know that will wait in vain."""
        if isinstance(error, NoAnswer):
            return  # they were told when it gave up
        text = f"{type(error).__name__}: {error}"[:TEXT]
        self._place.doing, self._place.since, self._place.call = f"raised {text}", time.monotonic(), ""
        self.tell(self._own())

    def close(self) -> None:
        """Listen no more."""
        if self._listener is not None:
            self._listener.close()

    def forget(self) -> None:
        """In a forked child: the port is the parent's."""
        if self._listener is not None:
            self._listener.forget()


# -- of this process --------------------------------------------------------------------------------------------


def open(world: Backend, timeout: float) -> None:
    """Listen, and ask when a wait fails. Collective. A second world takes the place of the first."""
    global _current
    close()
    _current = RollCall(world, timeout, whereabouts.here())
    whereabouts.ask = _current.call


def is_open() -> bool:
    """Whether this process listens."""
    return _current is not None


def close() -> None:
    """Neither listen nor ask any more."""
    global _current
    if _current is not None:
        _current.close()
    _current, whereabouts.ask = None, None


def _in_child() -> None:
    global _current
    if _current is not None:
        _current.forget()
    _current, whereabouts.ask = None, None


def raised(error: BaseException) -> None:
    """The script ends with an error."""
    if _current is not None:
        _current.raised(error)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
