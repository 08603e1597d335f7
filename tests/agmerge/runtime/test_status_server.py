# SPDX-License-Identifier: Apache-2.0
"""The status server among strangers: none of them ends it, keeps others waiting, or learns anything."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from agmerge.runtime.peers import status_server
from agmerge.runtime.peers.status_server import ENDED, UNASKED, PeerUnreachable, StatusServer, query_peer

TOKEN = "0123456789abcdef0123456789abcdef"
WAIT = 20.0
DEEP = b"[" * 1001


@pytest.fixture
def server() -> Iterator[StatusServer]:
    opened = StatusServer("127.0.0.1", TOKEN, lambda question: {"words": "is here", "asked": question["rank"]})
    yield opened
    opened.close()


def connected(server: StatusServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=WAIT)


def answers(server: StatusServer, patience: float = WAIT) -> bool:
    said = query_peer("127.0.0.1", server.port, TOKEN, {"rank": 3}, patience)
    return (said["words"], said["asked"]) == ("is here", 3)


def ends(stranger: socket.socket) -> bool:
    """Whether the server has hung up without a word."""
    try:
        return stranger.recv(100) == b""
    except ConnectionResetError:  # where it has not read all
        return True


def asked(text: bytes) -> bytes:
    return f"agmerge {TOKEN} ".encode() + text


@pytest.mark.parametrize(
    "line",
    [DEEP + b"\n", b"[]\n" * 100, b'{"token": "?", "rank": 0}\n' * 10, b"\0" * 20_000, b"GET / HTTP/1.0\r\n\r\n" * 10],
)
def test_no_line_without_the_token_ends_the_server(server: StatusServer, line: bytes) -> None:
    with connected(server) as stranger:
        stranger.sendall(line)
        assert ends(stranger)
    assert answers(server) and server._thread.is_alive()


@pytest.mark.parametrize("line", [DEEP, b"[]", b"3", b'"text"', b"null", b"{", b"{}", b"\xff", b"", b"9" * 5000])
def test_no_line_with_the_token_ends_the_server(server: StatusServer, line: bytes) -> None:
    with connected(server) as stranger:
        stranger.sendall(asked(line + b"\n"))
        assert ends(stranger)
    assert answers(server) and server._thread.is_alive()


@pytest.mark.parametrize("error", [RecursionError, MemoryError, KeyError, ZeroDivisionError, SystemError])
def test_an_error_while_answering_ends_that_connection_alone(error: type[Exception]) -> None:
    def answer(question: dict[str, Any]) -> dict[str, Any]:
        if question["rank"] == 1:
            raise error("of the answer")
        return {"words": "is here", "asked": question["rank"]}

    opened = StatusServer("127.0.0.1", TOKEN, answer)
    try:
        with pytest.raises(PeerUnreachable, match=ENDED):
            query_peer("127.0.0.1", opened.port, TOKEN, {"rank": 1}, WAIT)
        assert answers(opened)
    finally:
        opened.close()


def test_a_line_without_an_end_is_not_read_for_ever(server: StatusServer) -> None:
    with connected(server) as stranger:
        try:
            stranger.sendall(asked(b" " * 10 * status_server.LONGEST))
        except OSError:
            pass  # it has hung up while this was under way
        assert ends(stranger)
    assert answers(server)


def test_who_guesses_the_token_does_not_learn_how_far_it_is_right(
    server: StatusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the right and with a wrong next character the server does the same: it waits for the rest."""
    monkeypatch.setattr(status_server, "SILENCE", WAIT)
    whole = asked(b"")
    for length in (1, 9, 20, len(whole) - 2):
        for last in (whole[length : length + 1], b"?"):
            with connected(server) as stranger:
                stranger.sendall(whole[:length] + last)
                assert answers(server)  # by then it has read that
                stranger.settimeout(0.05)
                with pytest.raises(TimeoutError):
                    stranger.recv(1)


def test_silent_connections_keep_nobody_waiting(server: StatusServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_server, "SILENCE", 10 * WAIT)
    silent = [connected(server) for _ in range(30)]
    for _ in range(3):
        assert answers(server, patience=1.0)
    for one in silent:
        one.close()


def test_there_are_never_more_connections_than_said(server: StatusServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has been silent for longest has to go."""
    monkeypatch.setattr(status_server, "SILENCE", 10 * WAIT)
    monkeypatch.setattr(status_server, "MOST", 5)
    silent = [connected(server) for _ in range(12)]
    assert answers(server)
    assert all(ends(one) for one in silent[:7])
    assert len(server._talks) <= 5
    for one in silent:
        one.close()


def test_who_asks_nothing_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_server, "SILENCE", 0.1)
    opened = StatusServer("127.0.0.1", TOKEN, lambda question: {})
    try:
        with connected(opened) as silent, connected(opened) as slow:
            slow.sendall(asked(b'{"rank":'))
            assert ends(silent) and ends(slow)
        assert not opened._talks
    finally:
        opened.close()


def test_a_question_may_come_in_pieces(server: StatusServer) -> None:
    with connected(server) as peer:
        for piece in (b"ag", asked(b"")[2:20], asked(b"")[20:], b'{"rank"', b": 3}", b"\n"):
            peer.sendall(piece)
            assert answers(server)  # so that each piece comes by itself
        said = peer.makefile("rb").readline()
    assert json.loads(said.removeprefix(asked(b"")))["asked"] == 3


@contextmanager
def no_more_files() -> Iterator[None]:
    """As long as this lasts, this process can open none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_ones: list[int] = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/dev/fd"))) + 1, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                open_ones.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for one in open_ones:
            os.close(one)


@pytest.mark.parametrize("silent", [False, True])
def test_a_process_with_too_many_files_open_answers_all_the_same(server: StatusServer, silent: bool) -> None:
    """One file is kept for it, and silent connections have to go."""
    assert answers(server)
    stranger = connected(server) if silent else None
    assert answers(server)  # by then the server has let the stranger in
    peers = [socket.socket() for _ in range(3)]
    with no_more_files():
        for peer in peers:
            peer.settimeout(WAIT)
            peer.connect(("127.0.0.1", server.port))
            peer.sendall(asked(b'{"rank": 3}\n'))
            assert peer.recv(1000).endswith(b'"asked": 3}\n')
    for each in filter(None, [stranger, *peers]):
        each.close()


# -- who asks -----------------------------------------------------------------------------------------------


def replies(line: bytes) -> PeerUnreachable | dict[str, Any]:
    """What is made of ``line`` as an answer."""
    with socket.create_server(("127.0.0.1", 0)) as other:

        def serve() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(1000)
                try:
                    connection.sendall(line)
                except OSError:
                    pass  # who asked has read enough

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            return query_peer("127.0.0.1", other.getsockname()[1], TOKEN, {"rank": 0}, WAIT)
        except PeerUnreachable as silence:
            return silence
        finally:
            thread.join(WAIT)


@pytest.mark.parametrize("line", [DEEP, b"[]", b"3", b'"text"', b"null", b"{", b"\xff"])
@pytest.mark.parametrize("opening", [asked(b""), b""])
def test_what_is_no_answer_is_said_to_be_none(line: bytes, opening: bytes) -> None:
    silence = replies(opening + line + b"\n")
    assert isinstance(silence, PeerUnreachable)
    assert str(silence) == ("its answer cannot be read" if opening else ENDED)


def test_an_answer_without_an_end_is_not_read_for_ever() -> None:
    assert isinstance(replies(asked(b" " * 10 * status_server.LONGEST)), PeerUnreachable)


def test_an_answer_is_what_comes_behind_the_token() -> None:
    assert replies(asked(b'{"words": "is here"}\n')) == {"words": "is here"}


@pytest.mark.parametrize("address", ["a..b", "no such host.", "x" * 80])
def test_a_name_that_leads_nowhere_cannot_be_reached(address: str) -> None:
    with pytest.raises(PeerUnreachable, match="it cannot be reached"):
        query_peer(address, 1, TOKEN, {})


def test_who_has_too_many_files_open_says_that_it_cannot_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object, **named: object) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket, "create_connection", full)
    with pytest.raises(PeerUnreachable, match=UNASKED) as caught:
        query_peer("127.0.0.1", 1, TOKEN, {})
    assert caught.value.again


def test_a_refused_and_a_reset_connection_may_be_the_networks_doing(server: StatusServer) -> None:
    server.close()
    with pytest.raises(PeerUnreachable, match=ENDED) as refused:
        query_peer("127.0.0.1", server.port, TOKEN, {})
    reset = replies(b"")
    assert isinstance(reset, PeerUnreachable) and str(reset) == ENDED
    assert refused.value.again and reset.again
