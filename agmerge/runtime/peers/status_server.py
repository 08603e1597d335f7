"""Ask one question between two processes, and answer it: each is a line of JSON over TCP."""

from __future__ import annotations

import hmac
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

PATIENCE = 1.0  # seconds for a connection, and again for the answer
LONGEST = 8192  # bytes of a line

ENDED = "its process has ended"
STUCK = "its process does not answer: it is stopped, or busy in code that lets no other thread run"
CUT = "no answer: its host is down, or the network to it is cut"


class PeerUnreachable(Exception):
    """Report that there is no answer; the text says what that means."""


class StatusServer:
    """Listen at a port of ``address`` and answer there, on a thread, those that know ``token``.

    ``answer(question)`` gets what was asked and returns what to say; both are dicts that JSON can hold.
    """

    def __init__(self, address: str, token: str, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=128)
        self.port: int = self._socket.getsockname()[1]
        self._token, self._answer, self._end = token, answer, False
        self._thread = threading.Thread(target=self._run, name="agmerge roll call", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Answer one connection after the other, until the end."""
        while not self._end:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                time.sleep(0.0 if self._end else 0.1)  # no more files, say
                continue
            with connection:
                try:
                    self._serve(connection)
                except (OSError, ValueError, KeyError, TypeError):
                    pass  # not one of us

    def _serve(self, connection: socket.socket) -> None:
        """Answer one question, or nothing where the token is wrong."""
        connection.settimeout(PATIENCE)
        asked = json.loads(_line(connection, PATIENCE))
        if hmac.compare_digest(str(asked["token"]), self._token):
            connection.sendall(json.dumps({**self._answer(asked), "token": self._token}).encode() + b"\n")

    def close(self) -> None:
        """Stop to listen: to others it looks as if the process had ended."""
        self._end = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread; closing alone does not
        except OSError:
            pass
        self._socket.close()
        if self._thread is not threading.current_thread():
            self._thread.join(PATIENCE)

    def forget(self) -> None:
        """Let go of the port in a forked child, which would keep it open when its parent has ended."""
        self._end = True
        self._socket.close()


def query_peer(
    address: str, port: int, token: str, question: dict[str, Any], patience: float = PATIENCE
) -> dict[str, Any]:
    """Return what the process that listens at ``address`` and ``port`` answers.

    Takes at most twice ``patience`` seconds. ``token``: what it wants to see. ``question``: for its ``answer``. Raises
    :class:`PeerUnreachable` if nothing is said.
    """
    try:
        with socket.create_connection((address, port), timeout=patience) as connection:
            try:
                connection.sendall(json.dumps({**question, "token": token}).encode() + b"\n")
                reply = json.loads(_line(connection, patience))
            except TimeoutError as error:
                raise PeerUnreachable(STUCK) from error
    except TimeoutError as error:
        raise PeerUnreachable(CUT) from error
    except (ConnectionError, ValueError) as error:
        raise PeerUnreachable(ENDED) from error
    except OSError as error:
        raise PeerUnreachable(f"it cannot be reached ({error})") from error
    if reply.get("token") != token:
        raise PeerUnreachable(ENDED)  # its port is another's now
    return dict(reply)


def _line(connection: socket.socket, patience: float) -> bytes:
    """Return what was sent up to the end of the line. Raises ``ConnectionResetError`` if that never came."""
    end, data = time.monotonic() + patience, b""
    while not data.endswith(b"\n"):
        if time.monotonic() > end:
            raise TimeoutError
        part = connection.recv(LONGEST)
        if not part or len(data) > LONGEST:
            raise ConnectionResetError("the line has no end")
        data += part
    return data
