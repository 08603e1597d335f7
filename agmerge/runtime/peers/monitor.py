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
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from agmerge.backends import Backend, addresses, status
from agmerge.backends.base import Gather
from agmerge.backends.handshake import gather_texts
from agmerge.backends.status import RankStatus
from agmerge.errors import NoAnswer
from agmerge.runtime.peers.status_server import ENDED, PATIENCE, STUCK, PeerUnreachable, StatusServer, ask

SHOWN = 8  # ranks that are described; more are only named
FIRST = 10.0  # seconds, for the first question of all: a machine that starts many processes is busy
TEXT = 1000  # characters of an error that is told
TOLD = 8  # ranks that are told of a normal end: any of them can be asked
HURRY = 0.3  # seconds for each of them
REFUSED = "the connection was refused: by a firewall, or because the address is another machine's"
OPEN = (
    "let the machines of a job reach each other at all TCP ports, or choose their network by "
    "GLOO_SOCKET_IFNAME=<interface>"
)
DIFFERENT = (
    "The ranks make different calls: {others}, this rank for {call}. Is there a call inside `if rank() == 0`, or one "
    "that only some ranks come to?"
)
UNEVEN = "Do ranks have different numbers of batches? Then let each call optimizer.join() after its last one."

_current: PeerMonitor | None = None


@dataclass(frozen=True)
class Peer:
    """How to reach a rank. ``problem``: why it cannot be."""

    host: str
    pid: int
    address: str = ""
    port: int = 0
    token: str = ""
    problem: str = ""


class PeerMonitor:
    """All ranks, which are processes, and what they have told. Collective.

    ``gather`` moves texts between them. ``env``: of the launcher, which may say at what address all can be reached.
    """

    def __init__(self, rank: int, gather: Gather, place: RankStatus, env: Mapping[str, str] = os.environ) -> None:
        self.rank, self._place = rank, place
        self._told: dict[int, dict[str, Any]] = {}  # by rank: what it has said unasked, the last thing
        self._listener: StatusServer | None = None
        self._ended = False  # the script has come to its end
        mine = (socket.gethostname(), addresses.network(), addresses.to_master(env))
        known = [tuple(json.loads(text)) for text in gather(_json(mine), "roll call/hosts")]
        self.spread = len({network for _, network, _ in known}) > 1  # over several machines
        others = [address for _, network, address in known if network != mine[1] and address]
        others += [host for host, network, _ in known if network != mine[1]]
        own = self._listen(None if self.spread else "127.0.0.1", list(dict.fromkeys(others)), env)
        self.peers = [Peer(**json.loads(text)) for text in gather(_json(asdict(own)), "roll call/ports")]
        self._check(gather)

    @property
    def address(self) -> str:
        """Where this rank listens; empty if nowhere."""
        return self.peers[self.rank].address

    def _listen(self, address: str | None, hosts: Sequence[str], env: Mapping[str, str]) -> Peer:
        own = Peer(socket.gethostname(), os.getpid(), token=secrets.token_hex(16))
        try:
            address = address or addresses.reachable(hosts, env)
            self._listener = StatusServer(address, own.token, self._answer)
        except OSError as error:
            return replace(own, problem=f"it has no port to be asked at ({error})")
        return replace(own, address=address, port=self._listener.port)

    def _check(self, gather: Gather) -> None:
        """Ask the next rank once now: what cannot be reached cannot be told from what has ended."""
        size = len(self.peers)
        following = (self.rank + 1) % size
        why = self.peers[following].problem
        if not why:
            try:
                self._ask(following, {}, FIRST)
            except PeerUnreachable as silence:
                peer, what = self.peers[following], str(silence)
                what = REFUSED if what == ENDED else what  # it has just said where it listens
                why = f"it could not be asked at {peer.address}, port {peer.port}, from the start ({what})"
        for rank, said in enumerate(gather(why.encode(), "roll call/check")):
            after = (rank + 1) % size
            self.peers[after] = replace(self.peers[after], problem=said.decode())
        problems = {rank: peer.problem for rank, peer in enumerate(self.peers) if peer.problem}
        if problems and self.rank == 0:
            warnings.warn(
                f"should a rank fail, errors could not say what became of {self._listed(problems)}. Training goes on; "
                f"to have it otherwise, {OPEN}",
                stacklevel=2,
            )

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked.get("says"):
            self._told[int(asked["rank"])] = dict(asked["says"])
        heard = {str(rank): said for rank, said in self._told.copy().items() if said["ended"]}
        return {**self._own(), "heard": heard}

    def _own(self) -> dict[str, Any]:
        place = self._place
        seconds = time.monotonic() - place.since
        at = {"call": place.call, "step": place.step, "given_up": place.given_up, "ended": self._ended}
        return {"words": place.words(), "seconds": seconds, **at}

    def _ask(self, rank: int, says: dict[str, Any], patience: float = PATIENCE) -> dict[str, Any]:
        peer = self.peers[rank]
        return ask(peer.address, peer.port, peer.token, {"rank": self.rank, "says": says}, patience)

    def tell(
        self, says: dict[str, Any], ranks: Sequence[int] = (), patience: float = PATIENCE
    ) -> dict[int, dict[str, Any] | PeerUnreachable]:
        """Say something to ``ranks`` (none given: all), at once; what each answers, or what its silence means."""
        answers: dict[int, dict[str, Any] | PeerUnreachable] = {}

        def one(rank: int) -> None:
            try:
                answers[rank] = self._ask(rank, says, patience)
            except PeerUnreachable as silence:
                answers[rank] = silence

        others = [rank for rank in ranks or range(len(self.peers)) if rank != self.rank]
        threads = [
            threading.Thread(target=one, args=(rank,), daemon=True) for rank in others if not self.peers[rank].problem
        ]
        end = time.monotonic() + 2 * patience + 0.5
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        return {rank: answers.get(rank, PeerUnreachable(STUCK)) for rank in others if not self.peers[rank].problem}

    def call(self, call: str, ranks: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """Who of ``ranks`` is missing from the collective ``call``: as text, and by number."""
        own = self._own()
        given_up = replace(self._place, doing=f"has given up waiting for {call}").words()
        missing: dict[int, str] = {}
        waiting: dict[int, str] = {}
        elsewhere: dict[int, str] = {}
        uneven = False
        answers = self.tell({**own, "words": given_up, "given_up": True}, ranks)
        for answer in answers.values():
            for rank, said in {} if isinstance(answer, PeerUnreachable) else answer.get("heard", {}).items():
                self._told.setdefault(int(rank), said)
        for rank, answer in answers.items():
            last = self._told.get(rank)
            if isinstance(answer, PeerUnreachable):
                text = str(answer) if last is None else f"it {last['words']}; {answer}"
                text = f"it {last['words']}" if last is not None and last["ended"] and str(answer) == ENDED else text
            else:
                last, text = answer, f"it {answer['words']}, for {answer['seconds']:.1f} s"
            # Who has given up, wherever that was, was not the first to be missing.
            there = last is not None and (last["given_up"] or (last["call"], last["step"]) == (call, own["step"]))
            (waiting if there else missing)[rank] = text
            if last is not None:
                uneven = uneven or (last["ended"] and None not in (last["step"], own["step"]))
                if last["step"] == own["step"] and _differ(last["call"], call):
                    elsewhere[rank] = f"rank {rank} {'waited' if last['given_up'] else 'waits'} for {last['call']}"
        unknown = {rank: peer.problem for rank, peer in enumerate(self.peers) if rank in (ranks or [rank])}
        unknown = {rank: why for rank, why in unknown.items() if why and rank != self.rank}
        found = {"Missing": missing, "Not known": unknown, "Waiting too": waiting}
        parts = [f"{title}: {self._listed(of)}." for title, of in found.items() if of]
        problem = self.peers[self.rank].problem
        if problem:
            parts.append(f"Of this rank others say: {problem}.")
        if elsewhere and not unknown and set(missing) <= set(elsewhere):
            parts.append(DIFFERENT.format(others=", ".join(list(elsewhere.values())[:SHOWN]), call=call))
        elif not missing and not unknown and not problem:
            parts.append("Nobody is missing: the network or the backend is stuck.")
        return " ".join(parts + [UNEVEN] * uneven), tuple(missing)

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

    def ended(self, how: str) -> None:
        """The script comes to its normal end: let some know, of whom those that will wait in vain can hear it."""
        self._place.doing, self._place.since, self._place.call = how, time.monotonic(), ""
        self._ended = True
        size = len(self.peers)
        self.tell(self._own(), [(self.rank + i) % size for i in range(1, min(size, TOLD + 1))], HURRY)

    def close(self) -> None:
        """Listen no more."""
        if self._listener is not None:
            self._listener.close()

    def forget(self) -> None:
        """In a forked child: the port is the parent's."""
        if self._listener is not None:
            self._listener.forget()


# -- of this process --------------------------------------------------------------------------------------------


def open(rank: int, gather: Gather, env: Mapping[str, str] = os.environ) -> PeerMonitor:
    """Listen, and ask when a wait fails. Collective. A second roll call takes the place of the first."""
    global _current
    close()
    _current = PeerMonitor(rank, gather, status.here(), env)
    status.ask = _current.call
    return _current


def listen(rank: int, gather: Gather, env: Mapping[str, str]) -> str | None:
    """Open the roll call; return where this rank listens if ranks are spread over several machines. Collective."""
    calls = open(rank, gather, env)
    return calls.address if calls.spread else None


def over(world: Backend, timeout: float) -> Gather:
    """Texts by way of a backend that is open. ``timeout``: seconds, for each message."""
    return lambda text, name: gather_texts(world, text, name, timeout)


def is_open() -> bool:
    """Whether this process listens."""
    return _current is not None


def close() -> None:
    """Neither listen nor ask any more."""
    global _current
    if _current is not None:
        _current.close()
    _current, status.ask = None, None


def _in_child() -> None:
    global _current
    if _current is not None:
        _current.forget()
    _current, status.ask = None, None


def raised(error: BaseException) -> None:
    """The script ends with an error."""
    if _current is not None:
        _current.raised(error)


def ended(how: str) -> None:
    """The script comes to its normal end. ``how``: what it did, in words."""
    if _current is not None:
        _current.ended(how)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def _differ(theirs: str, ours: str) -> bool:
    """Whether two calls of one step are different ones: messages of one step follow each other, each in its time."""
    return bool(theirs) and theirs != ours and not (_is_message(theirs) and _is_message(ours))


def _is_message(call: str) -> bool:
    return call.startswith("buffer ")


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
