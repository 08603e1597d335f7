# SPDX-License-Identifier: Apache-2.0
"""Monitor of the ranks that are still there, and where: they are asked when a wait has failed, with any backend.

Every process listens at a port of its own, where a thread tells the activity of the script. Addresses, ports and tokens
are gathered when a process joins the others. A rank that misses one asks all of them at once, and tells them that it
gives up: those that miss it later know that it was not the first.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from agmerge.backends import Backend, addresses, open_files, status
from agmerge.backends.base import Gather
from agmerge.backends.handshake import gather_texts
from agmerge.backends.status import RankStatus
from agmerge.errors import NoAnswer, printable
from agmerge.runtime.peers.answers import LONGEST_CALL, Answer, Peer, heard, number, space
from agmerge.runtime.peers.status_server import (
    ENDED,
    PATIENCE,
    REFUSES,
    STUCK,
    UNASKED,
    UNREADABLE,
    Pauses,
    PeerUnreachable,
    StatusServer,
    query_peer,
)

# The report: which ranks are missing from a collective. Pure functions of all ranks' answers.

SHOWN = 8  # ranks that are described; more are only named
DIFFERENT = (
    "The ranks make different calls: {others}, this rank for {call}. Check for calls inside `if rank() == 0`, or "
    "calls that only some ranks make."
)
UNEVEN = "If ranks have different numbers of batches, call optimizer.join() on each rank after its last batch."
LATE = (
    "No rank is missing: the others timed out before this rank reached {call}. Check what delayed it, or set a longer "
    "timeout (timeout=, AGMERGE_TIMEOUT)."
)


@dataclass
class Report:
    """Ranks of a collective that does not end, each with a description of what it does."""

    missing: dict[int, str] = field(default_factory=dict)  # have not come as far
    waiting: dict[int, str] = field(default_factory=dict)  # wait for the same, or had to give up before
    elsewhere: dict[int, str] = field(default_factory=dict)  # of the missing: those that wait for another collective
    uneven: bool = False  # a rank came to the end of its script while this one is in a step
    late: bool = False  # all others had given up when this rank began to wait
    troubled: bool = False  # a rank has told a problem of its own process

    def text(
        self,
        call: str,
        unknown: Mapping[int, str],
        own_problem: str,
        listed: Callable[[Mapping[int, str]], str],
        own_trouble: Sequence[str] = (),
    ) -> str:
        """Return the report in a few sentences, with advice where there is any.

        ``call``: the collective that this rank waits for. ``unknown``: the ranks that could not be asked, and why.
        ``own_problem``: why others cannot ask this one; empty if they can. ``listed``: turns descriptions by rank into
        one line. ``own_trouble``: sentences about this process, which may be to blame.
        """
        groups = {"Missing": self.missing, "Not known": unknown, "Waiting too": self.waiting}
        parts = [f"{title}: {listed(group)}." for title, group in groups.items() if group]
        if own_problem:
            parts.append(f"Other ranks report about this rank: {own_problem}.")
        parts += own_trouble
        if self.elsewhere and not unknown and set(self.missing) <= set(self.elsewhere):
            parts.append(DIFFERENT.format(others=", ".join(list(self.elsewhere.values())[:SHOWN]), call=call))
        elif not (self.missing or unknown or own_problem or own_trouble or self.troubled):
            stuck = "No rank is missing: the network or the backend is stuck."
            parts.append(LATE.format(call=call) if self.late else stuck)
        return " ".join(parts + [UNEVEN] * self.uneven)


def report(own: Answer, answers: Mapping[int, Answer | PeerUnreachable], last_words: Mapping[int, Answer]) -> Report:
    """Return which ranks are missing from the collective that this rank waits for, and which are not.

    ``own``: this rank's account of itself. ``answers``: by rank, of those that were asked now. ``last_words``: by rank,
    its last message without a question: it counts for ranks that do not answer any more.
    """
    made, call, step = Report(), own.call, own.step
    known = []
    lost = False  # a rank is silent that has not said that it came to its end
    for rank, answer in answers.items():
        if isinstance(answer, PeerUnreachable):
            last = last_words.get(rank)
            lost = lost or last is None or not last.ended
            text = _description_of_silent(answer, last)
        else:
            last, text = answer, f"it {answer.words}, for {time.monotonic() - answer.since:.1f} s"
        text += f"; it {last.trouble}" if last is not None and last.trouble else ""
        # A rank that has given up, at any call, was not the first to be missing.
        arrived = last is not None and (last.given_up or (last.call, last.step) == (call, step))
        (made.waiting if arrived else made.missing)[rank] = text
        known.append(last)
        if last is not None:
            # A rank that had given up before it left had batches left.
            made.uneven = made.uneven or (last.ended and not last.given_up and None not in (last.step, step))
            made.troubled = made.troubled or bool(last.trouble)
            if last.step == step and _different(last.call, call):
                verb = "waited" if last.given_up else "waits"
                made.elsewhere[rank] = f"rank {rank} {verb} for {last.call}"
    # Where a rank was lost, the others may have called shutdown() in order to go on without it: no batches are uneven.
    made.uneven = made.uneven and not lost
    made.late = bool(known) and all(one is not None and one.given_up and one.since < own.since for one in known)
    return made


def listed(texts: Mapping[int, tuple[str, str]]) -> str:
    """Return one line of all ranks in ``texts``, of which each has a place and a description; many are only named."""
    shown = [f"rank {rank} ({place}): {text}" for rank, (place, text) in list(texts.items())[:SHOWN]]
    more = [str(rank) for rank in list(texts)[SHOWN:]]
    return "; ".join(shown + ([f"and ranks {', '.join(more)}"] if more else []))


def _description_of_silent(silence: PeerUnreachable, last: Answer | None) -> str:
    """Return the description of a rank that does not answer: its last words, and the meaning of its silence."""
    if last is None:
        return str(silence)
    if last.ended and str(silence) == ENDED:
        return f"it {last.words}"  # and its process has ended, which goes without saying
    return f"it {last.words}; {silence}"


def _different(theirs: str, ours: str) -> bool:
    """Return whether two calls of one step are different ones: its messages follow each other, each in its time."""
    return bool(theirs) and theirs != ours and not (_is_message(theirs) and _is_message(ours))


def _is_message(call: str) -> bool:
    """Return whether a collective is the message of a merge buffer."""
    return call.startswith("buffer ")


# The monitor.

FIRST = 10.0  # seconds, for the first question of all: a machine that starts many processes is busy
AGAIN = 4.0  # seconds for which a rank that refuses is asked again: networks reset connections for some of them
ONCE_MORE = 1.0  # seconds, where nothing has failed yet
PAUSE = 0.2  # seconds between two questions to a rank that refuses
TEXT = 1000  # characters of an error that is told
TOLD = 8  # ranks that are told of a normal end: any of them can be asked
HURRY = 0.3  # seconds for each of them
REFUSED = "the connection was refused: by a firewall, or because the address is another machine's"
OPEN = "Open all TCP ports between the machines of the job, or set GLOO_SOCKET_IFNAME=<interface>"


class PeerMonitor:
    """Monitor that tells other ranks what this one does, and asks them when one is missing.

    Making one is collective. ``rank``: this one's number. ``gather`` moves texts between the ranks. ``status``: the
    activity of this rank, read whenever it is asked. ``env``: of the launcher, which may say at what address all can be
    reached. Warns on rank 0 if a rank cannot be reached, and raises nothing for that.
    """

    def __init__(self, rank: int, gather: Gather, status: RankStatus, env: Mapping[str, str] = os.environ) -> None:
        self.rank = rank
        self._status = status
        self._told: dict[int, Answer] = {}  # by rank: the last thing that it has said here unasked
        self._heard: dict[int, Answer] = {}  # by rank: the same of those that have told others
        self._server: StatusServer | None = None  # None: this rank has found no port to listen at
        self._ended = self._over = False  # the script has come to its end: normally, or also by an error
        self._gave_up = False  # a wait of this rank has failed
        self._pauses = Pauses()
        own_place = (socket.gethostname(), addresses.network(), addresses.to_master(env))
        places = [tuple(json.loads(text)) for text in gather(_json(own_place), "roll call/hosts")]
        self._size = len(places)  # ranks
        self.spread = len({network for _, network, _ in places}) > 1  # over several machines
        others = [address for _, network, address in places if network != own_place[1] and address]
        others += [host for host, network, _ in places if network != own_place[1]]
        own = self._listen(None if self.spread else "127.0.0.1", list(dict.fromkeys(others)), env)
        self.peers = [Peer.read(text) for text in gather(_json(asdict(own)), "roll call/ports")]  # by rank
        self._check(gather)

    @property
    def address(self) -> str:
        """Return where this rank listens; empty if nowhere."""
        return self.peers[self.rank].address

    def _listen(self, address: str | None, hosts: Sequence[str], env: Mapping[str, str]) -> Peer:
        """Open a port and return how this rank is reached there.

        ``address``: where to listen; None: wherever the machines ``hosts``, names or addresses, reach this one.
        """
        own = Peer(socket.gethostname(), os.getpid(), space(), token=secrets.token_hex(16))
        try:
            address = address or addresses.reachable(hosts, env)
            self._server = StatusServer(address, own.token, self._answer, self._pauses)
        except OSError as error:
            return replace(own, problem=f"it has no status port ({error})")
        return replace(own, address=address, port=self._server.port)

    def _check(self, gather: Gather) -> None:
        """Collective. Ask the next rank once now: an unreachable rank cannot be told from one that has ended."""
        size = len(self.peers)
        following = (self.rank + 1) % size
        problem = self.peers[following].problem
        if not problem:
            answer = self._ask_again(following, None, FIRST, ONCE_MORE)
            if isinstance(answer, PeerUnreachable):
                peer, why = self.peers[following], str(answer)
                why = REFUSED if answer.again and why != UNASKED else why  # it has just said where it listens
                problem = (
                    f"its status port {peer.address}, port {peer.port}, could not be reached from the start ({why})"
                )
        for rank, text in enumerate(gather(problem.encode(), "roll call/check")):
            after = (rank + 1) % size
            self.peers[after] = self.peers[after].with_problem(text.decode(errors="replace"))
        if self._problems() and self.rank == 0:
            warnings.warn(
                f"AGM207: Cannot reach the status port of {self._listed(self._problems())}. Training continues, but "
                f"errors may not be able to name a failed rank. {OPEN}.",
                stacklevel=2,
            )

    def _problems(self) -> dict[int, str]:
        """Return why ranks cannot be asked, by rank; without those that can."""
        return {rank: peer.problem for rank, peer in enumerate(self.peers) if peer.problem}

    # -- answer and ask ---------------------------------------------------------------------------------------------

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's activity, and which others have told it their end. Runs on the server's thread.

        Raises ``ValueError`` or ``KeyError`` for anything but a rank's question.
        """
        asked = number(question["rank"], self._size)
        if question.get("says") is not None:
            self._told[asked] = Answer.read(question["says"])
        ends = {str(rank): words.said() for rank, words in self._told.copy().items() if words.ended}
        return {**self._own_answer().said(), "heard": ends}

    def _own_answer(self) -> Answer:
        """Return this rank's activity, as others get it."""
        own = self._status
        call, trouble = printable(own.call, LONGEST_CALL), self._pause() or open_files.shortage(self._size)
        gave_up = own.given_up or (self._over and self._gave_up)
        return Answer(own.describe(), own.since, call, own.step, gave_up, self._ended, self._over, trouble)

    def _pause(self) -> str:
        """Return that this process did not run, for longer than can be neglected; empty if it did."""
        own = self._status
        return self._pauses.describe(own.began, least=(time.monotonic() - own.since) / 4)

    def _last_words(self) -> dict[int, Answer]:
        """Return, by rank, the last thing that it has said unasked, here or to another."""
        return {**self._heard.copy(), **self._told.copy()}

    def _ask(self, rank: int, says: Answer | None, patience: float = PATIENCE) -> Answer:
        """Return the answer of ``rank``, and tell it ``says``; raise :class:`PeerUnreachable` if it does not answer."""
        peer = self.peers[rank]
        question = {"rank": self.rank, "says": None if says is None else says.said()}
        reply = query_peer(peer.address, peer.port, peer.token, question, patience)
        try:
            self._heard.update(heard(reply, self._size))
            return Answer.read(reply)
        except ValueError as error:
            raise PeerUnreachable(UNREADABLE) from error

    def _ask_again(self, rank: int, says: Answer | None, patience: float, again: float) -> Answer | PeerUnreachable:
        """Return the answer of ``rank``, or the meaning of its silence.

        ``says``, ``patience``: as those of :meth:`tell`. ``again``: seconds for which one that refuses is asked again,
        unless it is known to have ended: it may be there, and the network be at fault.
        """
        until, peer = time.monotonic() + again, self.peers[rank]
        while True:
            try:
                return self._ask(rank, says, patience)
            except PeerUnreachable as silence:
                last, runs = self._last_words().get(rank), peer.runs(self.peers[self.rank])
                known = last is not None and (last.given_up or last.over)
                if not silence.again or known or (runs is False and str(silence) == ENDED):
                    return silence
                if time.monotonic() + PAUSE > until:
                    return PeerUnreachable(REFUSES.format(again), True) if runs and str(silence) == ENDED else silence
            time.sleep(PAUSE)

    def tell(
        self, says: Answer, ranks: Sequence[int] = (), patience: float = PATIENCE, again: float = 0.0
    ) -> dict[int, Answer | PeerUnreachable]:
        """Send ``says`` to ``ranks`` at once and return, by rank, the answer of each or the meaning of its silence.

        ``ranks``: none given: all. Those that cannot be reached are left out. ``patience``: seconds for a connection,
        and again for an answer; the call takes half a second more at most. ``again``: seconds for which those that
        refuse are asked again.
        """
        answers: dict[int, Answer | PeerUnreachable] = {}

        def ask(rank: int) -> None:
            answers[rank] = self._ask_again(rank, says, patience, again)

        others = [rank for rank in ranks or range(len(self.peers)) if rank != self.rank]
        reachable = [rank for rank in others if not self.peers[rank].problem]
        threads = [threading.Thread(target=ask, args=(rank,), daemon=True) for rank in reachable]
        end = time.monotonic() + again + 2 * patience + 0.5
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        return {rank: answers.get(rank, PeerUnreachable(STUCK)) for rank in reachable}

    def describe_missing(self, call: str, ranks: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """Return which of ``ranks`` are missing from the collective ``call``: as text, and by number.

        ``ranks``: of the world; empty: all. Asks all of them at once, and tells them that this rank gives up.
        """
        self._gave_up = True
        own = replace(self._own_answer(), call=printable(call, LONGEST_CALL))
        pause, limit = self._pause(), open_files.advice(self._size)
        trouble = [f"This process {pause}. The others may have given up meanwhile."] if pause else []
        trouble += [limit] if limit else []
        words = replace(self._status, phase=f"has given up waiting for {call}").describe()
        answers = self.tell(replace(own, words=words, since=time.monotonic(), given_up=True), ranks, again=AGAIN)
        unknown = {rank: why for rank, why in self._problems().items() if rank in (ranks or [rank])}
        unknown |= {rank: UNASKED for rank, answer in answers.items() if str(answer) == UNASKED}
        unknown.pop(self.rank, None)
        made = report(own, {rank: answers[rank] for rank in answers if rank not in unknown}, self._last_words())
        text = made.text(call, unknown, self.peers[self.rank].problem, self._listed, trouble)
        return text, tuple(made.missing)

    def _listed(self, texts: Mapping[int, str]) -> str:
        """Return ``texts``, by rank, as one line that names the host and process of each."""
        return listed(
            {rank: (f"host {self.peers[rank].host}, pid {self.peers[rank].pid}", texts[rank]) for rank in texts}
        )

    # -- the end ----------------------------------------------------------------------------------------------------

    def raised(self, error: BaseException) -> None:
        """Tell those that will wait in vain that the script ends with ``error``."""
        if isinstance(error, NoAnswer):
            return  # they were told when it gave up
        self._status.end("raised " + printable(f"{type(error).__name__}: {error}", TEXT))
        self._over = True
        self.tell(self._own_answer())

    def ended(self, how: str) -> None:
        """Tell some ranks that the script has ended normally; ranks that will wait in vain can hear it from these.

        ``how``: in words, to be read after "it".
        """
        self._status.end(f"had given up waiting for other ranks, and {how}" if self._gave_up else how)
        self._ended = self._over = True
        says = replace(self._own_answer(), trouble="")
        size = len(self.peers)
        self.tell(says, [(self.rank + i) % size for i in range(1, min(size, TOLD + 1))], HURRY)

    def close(self) -> None:
        """Stop to listen."""
        if self._server is not None:
            self._server.close()

    def forget(self) -> None:
        """Release the port in a forked child: it is the parent's."""
        if self._server is not None:
            self._server.forget()


# -- of this process --------------------------------------------------------------------------------------------

_current: PeerMonitor | None = None  # the monitor of this process, None: alone; written by _install alone


def _install(monitor: PeerMonitor | None) -> None:
    """Make ``monitor`` this process's, which is asked when a wait fails; None: there is none any more."""
    global _current
    _current = monitor
    status.install_peer_query(None if monitor is None else monitor.describe_missing)


def open(rank: int, gather: Gather, env: Mapping[str, str] = os.environ) -> PeerMonitor:
    """Collective. Listen, and ask when a wait fails. A second monitor takes the place of the first.

    Arguments as those of :class:`PeerMonitor`.
    """
    close()
    opened = PeerMonitor(rank, gather, status.current(), env)
    _install(opened)
    return opened


def listen(rank: int, gather: Gather, env: Mapping[str, str]) -> str | None:
    """Collective. Open the monitor; return where this rank listens if ranks are spread over several machines.

    For backends that connect their ranks only afterwards. Arguments as those of :class:`PeerMonitor`.
    """
    opened = open(rank, gather, env)
    return opened.address if opened.spread else None


def over(world: Backend, timeout: float) -> Gather:
    """Return a ``gather`` that moves texts through ``world``, an open backend. ``timeout``: seconds for a message."""
    return lambda text, name: gather_texts(world, text, name, timeout)


def is_open() -> bool:
    """Return whether this process listens."""
    return _current is not None


def close() -> None:
    """Stop to listen, and to ask."""
    if _current is not None:
        _current.close()
    _install(None)


def _after_fork_in_child() -> None:
    """Forget the parent's monitor: a child, such as a worker of a DataLoader, is no rank."""
    if _current is not None:
        _current.forget()
    _install(None)


def raised(error: BaseException) -> None:
    """Tell the other ranks, if there are any, that the script ends with ``error``."""
    if _current is not None:
        _current.raised(error)


def ended(how: str) -> None:
    """Tell the other ranks, if there are any, that the script has ended normally. ``how``: what it did, in words."""
    if _current is not None:
        _current.ended(how)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _json(value: Any) -> bytes:
    """Return ``value`` as JSON, for a ``gather``."""
    return json.dumps(value).encode()
