# SPDX-License-Identifier: Apache-2.0
"""One question between two processes, and its answer: each is a line over TCP, a token and then JSON.

Anybody may come to the port. So a line is read on only if it begins with the token, no connection waits for another
one, and there are never more than ``MOST`` of them: then the one that has been silent for longest has to go.
"""

from __future__ import annotations

import hmac
import json
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from agmerge.backends.open_files import TOO_MANY
from agmerge.runtime.peers.answers import json_object

# Pauses, in which this process did not run: a thread that wakes up twice a second has not woken up for longer.
#
# A stopped process waits no longer than others, by its own clock, but in vain: they have given up in the meantime.

EVERY = 0.5  # seconds between two beats, at most
SHORTEST = 2.0  # seconds without a beat that count: a busy machine lets a thread wait for some of them
REMEMBERED = 32  # pauses
BUSY = 0.25  # seconds of CPU time in a second of a pause: with less of it nothing can have run


@dataclass(frozen=True)
class Pause:
    """Time between two beats."""

    end: float  # seconds of the monotonic clock
    seconds: float
    cpu: float  # seconds of CPU time of all threads, in it


class Pauses:
    """Times at which this process did not run. :meth:`beat` is called by one thread, anything else by any.

    Before the first beat nothing is known: where no thread beats, there was no pause.
    """

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None  # monotonic clock and CPU time of the last beat
        self._pauses: deque[Pause] = deque(maxlen=REMEMBERED)
        self._lock = threading.Lock()  # a pause is in the list or since the last beat, never in neither

    def beat(self) -> None:
        """Record that this process runs."""
        with self._lock:
            now = _now()  # read once: between two readings a process can be stopped
            pause = self._since_last(*now)
            self._last = now
            if pause.seconds >= SHORTEST:
                self._pauses.append(pause)

    def describe(self, moment: float, least: float = SHORTEST) -> str:
        """Return for how long this process did not run, to be read after "it"; empty if less than ``least`` seconds.

        ``moment``: of the monotonic clock; only pauses that ended later count. A pause that
        has just ended, before its beat, does.
        """
        with self._lock:
            pauses = [*self._pauses, self._since_last(*_now())]
        pauses = [pause for pause in pauses if pause.end > moment and pause.seconds >= SHORTEST]
        seconds, cpu = sum(pause.seconds for pause in pauses), sum(pause.cpu for pause in pauses)
        if seconds < max(least, SHORTEST):
            return ""
        stopped = "stopped (SIGSTOP, a debugger, a frozen container or machine)"
        why = stopped if cpu < BUSY * seconds else "stopped, or in code that lets no other thread run"
        return f"did not run for {seconds:.1f} s: it was {why}"

    def _since_last(self, now: float, cpu: float) -> Pause:
        """Return the time from the last beat to this moment; none before the first."""
        before, cpu_before = self._last or (now, cpu)
        return Pause(now, now - before, cpu - cpu_before)


def _now() -> tuple[float, float]:
    """Return the seconds of the monotonic clock, and of CPU time of all threads of this process."""
    return time.monotonic(), time.process_time()


# The server, and the question.

PATIENCE = 1.0  # seconds for a connection, and again for the answer
SILENCE = 3.0  # seconds from a connection to the end of its question: a rank asks at once
LONGEST = 16384  # bytes of a line
MOST = 64  # connections that have not asked yet
ENDED = "its process has ended"
STUCK = "its process does not answer: it is stopped, or runs code that blocks all other threads"
CUT = "no answer: its host is down, or the network to it is cut"
REFUSES = (
    "its process is running, but has refused connections for {:g} s: it called agmerge.shutdown(), or something "
    "resets connections"
)
UNREADABLE = "its answer cannot be read"
UNASKED = "this process cannot ask it: too many open files"


class PeerUnreachable(Exception):
    """Error of a peer that gives no answer; its text says what that means.

    ``again``: asked again, it might be there: a connection was refused or reset, which may be the network's doing.
    """

    def __init__(self, text: str, again: bool = False) -> None:
        super().__init__(text)
        self.again = again


class StatusServer:
    """Server at a port of ``address``, which answers, on a thread, those that know ``token``.

    ``answer(question)`` returns the answer; both are dicts that JSON can hold. ``pauses``: is told twice a second that
    this process runs; None: nothing is.
    """

    def __init__(
        self,
        address: str,
        token: str,
        answer: Callable[[dict[str, Any]], dict[str, Any]],
        pauses: Pauses | None = None,
    ) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=128)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._token, self._answer, self._end = token, answer, False
        self._pauses = pauses or Pauses()
        self._talks: dict[socket.socket, _Talk] = {}  # those that have not asked yet, the oldest first
        self._spare: int | None = None  # a file to give up where no other can be opened, for a connection
        self._watched = getattr(selectors, "PollSelector", selectors.SelectSelector)()  # no file that forks would share
        self._watched.register(self._socket, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="agmerge roll call", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Answer all connections, side by side, until the end."""
        while not self._end:
            try:
                self._turn()
            except Exception:
                time.sleep(0.1)  # of no connection: no memory, say
        for connection in list(self._talks):
            self._hang_up(connection)
        self._give_up_spare()

    def _turn(self) -> None:
        """Wait for connections and questions, at most until the next beat, and handle them."""
        if self._spare is None:
            with suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY)
        came = [key.fileobj for key, _ in self._watched.select(EVERY)]
        self._pauses.beat()
        for connection in came:
            if self._end:
                return
            if connection is self._socket:
                self._accept()
            elif isinstance(connection, socket.socket):
                self._hear(connection)
        now = time.monotonic()
        for connection in [one for one, talk in self._talks.items() if talk.end < now]:
            self._hang_up(connection)

    def _accept(self) -> None:
        """Accept a new connection; where there are too many, in place of the one that has been silent for longest."""
        connection = self._next()
        if connection is None:
            return
        while len(self._talks) >= MOST:
            self._hang_up(next(iter(self._talks)))
        self._talks[connection] = _Talk(time.monotonic() + SILENCE)
        connection.setblocking(False)
        self._watched.register(connection, selectors.EVENT_READ)
        self._hear(connection)  # its question may be here already

    def _next(self) -> socket.socket | None:
        """Return a new connection, if need be in place of another open file; None if there is none."""
        while True:
            try:
                return self._socket.accept()[0]
            except BlockingIOError:
                return None  # it has left again
            except OSError as error:
                if error.errno not in TOO_MANY or not self._make_room():
                    time.sleep(0.01)  # not to try again all the time
                    return None

    def _make_room(self) -> bool:
        """Close a file, so that the next connection can be accepted; return whether there was one to close."""
        if self._talks:
            self._hang_up(next(iter(self._talks)))
            return True
        return self._give_up_spare()

    def _give_up_spare(self) -> bool:
        """Close the file that is kept for it; return whether there was one."""
        spare, self._spare = self._spare, None
        if spare is not None:
            os.close(spare)
        return spare is not None

    def _hear(self, connection: socket.socket) -> None:
        """Read on; answer where the question is complete, hang up where it is none. Every error ends this one alone."""
        try:
            over = self._talks[connection].read(connection, self._opening())
            if over:
                self._reply(connection, self._talks[connection].line)
        except BlockingIOError:
            return
        except Exception:
            over = True  # no rank of ours
        if over:
            self._hang_up(connection)

    def _reply(self, connection: socket.socket, line: bytes) -> None:
        """Answer the question in ``line``; raise for anything else."""
        answer = self._answer(json_object(line))
        connection.settimeout(PATIENCE / 2)  # it fits into the buffers of a connection that has sent nothing yet
        connection.sendall(self._opening() + json.dumps(answer, ensure_ascii=False).encode() + b"\n")

    def _opening(self) -> bytes:
        """Return the beginning of every line."""
        return _opening(self._token)

    def _hang_up(self, connection: socket.socket) -> None:
        """Close a connection."""
        self._talks.pop(connection, None)
        with suppress(KeyError, ValueError, OSError):
            self._watched.unregister(connection)
        connection.close()

    def close(self) -> None:
        """Stop to listen: to others it looks as if the process had ended."""
        self._end = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread; closing alone does not
        if self._thread is not threading.current_thread():
            self._thread.join(PATIENCE)
        self._socket.close()

    def forget(self) -> None:
        """Release the port in a forked child, which would keep it open when its parent has ended."""
        self._end = True
        self._socket.close()
        for connection in list(self._talks):
            connection.close()
        self._give_up_spare()


class _Talk:
    """Bytes that have come over a connection so far. ``end``: of the monotonic clock, when it must have asked."""

    def __init__(self, end: float) -> None:
        self.end, self._came = end, bytearray()
        self.line = b""  # the question, once it is complete

    def read(self, connection: socket.socket, opening: bytes) -> bool:
        """Read the bytes that have come; return whether the question is complete; raise ``OSError`` for anything else.

        ``opening``: its required beginning. Raises ``BlockingIOError`` where nothing has come.
        """
        part = connection.recv(LONGEST)
        self._came += part
        if not part or len(self._came) > LONGEST:
            raise ConnectionResetError("no question")
        if len(self._came) < len(opening):
            return False  # to hang up at the first wrong character would tell which are right
        if not hmac.compare_digest(bytes(self._came[: len(opening)]), opening):
            raise ConnectionResetError("no question")
        if self._came.endswith(b"\n"):
            self.line = bytes(self._came[len(opening) :])
        return bool(self.line)


def query_peer(
    address: str, port: int, token: str, question: dict[str, Any], patience: float = PATIENCE
) -> dict[str, Any]:
    """Return the answer of the process that listens at ``address`` and ``port``.

    Takes at most twice ``patience`` seconds. ``token``: the one that it expects. ``question``: for its ``answer``.
    Raises :class:`PeerUnreachable` if nothing is said, or nothing that a rank would say.
    """
    opening = _opening(token)
    try:
        with socket.create_connection((address, port), timeout=patience) as connection:
            try:
                connection.sendall(opening + json.dumps(question, ensure_ascii=False).encode() + b"\n")
                line = _line(connection, patience)
            except TimeoutError as error:
                raise PeerUnreachable(STUCK) from error
    except TimeoutError as error:
        raise PeerUnreachable(CUT) from error
    except ConnectionError as error:
        raise PeerUnreachable(ENDED, again=True) from error
    except (OSError, ValueError) as error:  # the latter of a name that can be none
        if getattr(error, "errno", None) in TOO_MANY:
            raise PeerUnreachable(UNASKED, again=True) from error
        raise PeerUnreachable(f"it cannot be reached ({error})") from error
    if not line.startswith(opening):
        raise PeerUnreachable(ENDED)  # its port is another's now
    try:
        return json_object(line[len(opening) :])
    except ValueError as error:
        raise PeerUnreachable(UNREADABLE) from error


def _opening(token: str) -> bytes:
    """Return the beginning of a line with ``token``."""
    return f"agmerge {token} ".encode()


def _line(connection: socket.socket, patience: float) -> bytes:
    """Return the bytes up to the end of the line.

    ``patience``: seconds for all of it, else ``TimeoutError``. Raises ``ConnectionResetError`` if the end never came.
    """
    end, data = time.monotonic() + patience, b""
    while not data.endswith(b"\n"):
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        part = connection.recv(LONGEST)
        data += part
        if not part or len(data) > LONGEST:
            raise ConnectionResetError("the line has no end")
    return data
