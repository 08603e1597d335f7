# SPDX-License-Identifier: Apache-2.0
"""What a rank is told of those that it misses: one test for each kind of answer, and for each kind of silence."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agmerge import testing
from agmerge.backends import addresses, status, torch_store
from agmerge.backends.local import Group, LocalBackend
from agmerge.backends.status import RankStatus
from agmerge.errors import CollectiveTimeout
from agmerge.runtime import workers
from agmerge.runtime.peers import monitor, status_server
from agmerge.runtime.peers.monitor import PeerMonitor, over
from agmerge.runtime.peers.status_server import CUT, ENDED, STUCK

ROOT = Path(__file__).parents[3]
WAIT = 20.0
CALL, STEP = "buffer 3", 12


@pytest.fixture(autouse=True)
def soon_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who refuses is asked again for less than four seconds, so that tests are short."""
    monkeypatch.setattr(monitor, "AGAIN", 0.4)


def waits() -> RankStatus:
    return RankStatus(f"waits for {CALL}", step=STEP, call=CALL)


def called(places: list[RankStatus], change: Callable[[list[PeerMonitor]], None], ranks: tuple[int, ...] = ()) -> Any:
    """The roll call of rank 0, which waits, when the others are at ``places`` and ``change`` has happened."""
    everybody = [waits(), *places]
    calls = testing.run(len(everybody), lambda rank: PeerMonitor(rank, over(workers.world(), WAIT), everybody[rank]))
    try:
        change(calls)
        return calls[0].describe_missing(CALL, ranks)
    finally:
        for one in calls:
            one.close()


def nothing(calls: list[PeerMonitor]) -> None:
    """As it is."""


def test_ranks_that_wait_for_the_same_are_not_missing() -> None:
    text, missing = called([waits(), waits()], nothing)
    assert missing == ()
    assert text.startswith("Waiting too: rank 1 (host ") and f"; rank 2 (host {socket.gethostname()}, pid " in text
    assert "it waits for buffer 3 (step 12), for 0." in text
    assert text.endswith("No rank is missing: the network or the backend is stuck.")


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (RankStatus(), "it is in its script, before the first step, for "),
        (RankStatus("is in a backward pass", step=11), "it is in a backward pass (step 11), for "),
        (RankStatus("waits for buffer 3", step=11, call=CALL), "it waits for buffer 3 (step 11), for "),
        (RankStatus("waits for buffer 2", step=STEP, call="buffer 2"), "it waits for buffer 2 (step 12), for "),
        (RankStatus("is in its script, before a backward pass", step=0), "before a backward pass (step 0), for "),
    ],
)
def test_a_rank_that_is_elsewhere_says_where(place: RankStatus, words: str) -> None:
    text, missing = called([waits(), place], nothing)
    assert missing == (2,)
    first, second = text.split(" Waiting too: ")
    assert first.startswith("Missing: rank 2 (host ") and words in first
    assert second.startswith("rank 1 (host ")


def test_a_rank_says_for_how_long() -> None:
    place = RankStatus("is in a backward pass", step=11)
    place.since -= 30.0
    text, _ = called([place], nothing)
    assert "for 30." in text


def test_a_process_that_has_ended_is_known_to_have() -> None:
    text, missing = called([waits(), waits()], lambda calls: calls[2].close())
    assert missing == (2,)
    assert f"pid {os.getpid()}): {ENDED}. Waiting too: rank 1" in text


def test_a_port_that_is_anothers_now_is_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def serve() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b'{"words": "is a web server", "call": "", "step": null}\n')

        threading.Thread(target=serve, daemon=True).start()

        def change(calls: list[PeerMonitor]) -> None:
            calls[0].peers[1] = monitor.replace(calls[0].peers[1], port=other.getsockname()[1])

        text, missing = called([waits()], change)
    assert missing == (1,) and ENDED in text and "web server" not in text


@pytest.mark.slow
def test_a_process_that_is_stopped_is_told_from_one_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def change(calls: list[PeerMonitor]) -> None:
        assert calls[1]._server is not None
        monkeypatch.setattr(calls[1]._server, "_answer", lambda asked: go_on.wait(WAIT) and {})

    text, missing = called([RankStatus()], change)
    go_on.set()
    assert missing == (1,) and STUCK in text


@pytest.mark.slow
def test_a_host_that_does_not_answer_is_told_from_one_that_refuses() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.socket() as a, socket.socket() as b:
        for waiting in (a, b):  # nobody takes them off the queue, and there is no place for another
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())

        def change(calls: list[PeerMonitor]) -> None:
            calls[0].peers[1] = monitor.replace(calls[0].peers[1], port=full.getsockname()[1])

        text, missing = called([waits()], change)
    assert missing == (1,) and CUT in text


def test_a_rank_that_has_given_up_is_not_the_one_that_is_missing() -> None:
    def change(calls: list[PeerMonitor]) -> None:
        calls[2].close()
        text, missing = calls[1].describe_missing(CALL, ())
        assert missing == (2,) and "Waiting too: rank 0" in text
        calls[1].close()

    text, missing = called([waits(), RankStatus()], change)
    assert missing == (2,)
    first, second = text.split(" Waiting too: ")
    assert ENDED in first and "given up" not in first
    assert f"it has given up waiting for buffer 3 (step 12); {ENDED}" in second


@pytest.mark.parametrize("still_there", [True, False])
def test_a_rank_whose_script_raised_says_what(still_there: bool) -> None:
    def change(calls: list[PeerMonitor]) -> None:
        calls[1].raised(FloatingPointError("of its own"))
        if not still_there:
            calls[1].close()

    text, missing = called([RankStatus("is in a backward pass", step=STEP)], change)
    assert missing == (1,)
    assert "it raised FloatingPointError: of its own (step 12)" in text
    assert (ENDED in text) is not still_there


@pytest.mark.parametrize("given_up", [False, True])
def test_ranks_in_different_calls_are_told_so_whoever_gives_up_first(given_up: bool) -> None:
    """One rank alone computes a metric: neither is the network to blame, nor is nobody missing."""
    text, missing = called([RankStatus("in allreduce", step=STEP, call="allreduce/digest", given_up=given_up)], nothing)
    assert missing == (() if given_up else (1,))
    word = "waited" if given_up else "waits"
    assert f"make different calls: rank 1 {word} for allreduce/digest, this rank for buffer 3. Check for calls" in text
    assert "if rank() == 0" in text and "No rank is missing" not in text


@pytest.mark.parametrize("call", ["buffer 2", "buffer 3.1"])
def test_messages_of_one_step_are_no_different_calls(call: str) -> None:
    text, _ = called([RankStatus("gave up", step=STEP, call=call, given_up=True)], nothing)
    assert "different calls" not in text and "No rank is missing" in text


def test_a_rank_that_is_a_step_behind_makes_no_different_calls() -> None:
    place = RankStatus("waits", step=STEP - 1, call="times/length")
    assert "different calls" not in called([place], nothing)[0]


def test_who_has_died_is_to_blame_and_not_who_is_elsewhere() -> None:
    place = RankStatus("gave up", step=STEP, call="plan/length", given_up=True)
    text, missing = called([place, RankStatus()], lambda calls: calls[2].close())
    assert missing == (2,) and "different calls" not in text


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("how", ["came to the end of its script", "has called agmerge.shutdown()"])
def test_a_rank_that_has_come_to_its_end_says_so_and_what_helps(
    how: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it has told another rank, which is asked."""
    monkeypatch.setattr(monitor, "TOLD", 1)

    def change(calls: list[PeerMonitor]) -> None:
        calls[1].ended(how)
        calls[1].close()

    text, missing = called([RankStatus("waits", step=STEP), *(waits() for _ in range(ranks - 2))], change)
    assert missing == (1,)
    assert f"): it {how} (step 12)." in text and "If ranks have different numbers of batches," in text
    assert "optimizer.join()" in text and ENDED not in text


def test_a_rank_that_has_given_up_elsewhere_is_not_missing_either() -> None:
    place = RankStatus("has given up waiting for buffer 2", step=STEP, call="buffer 2", given_up=True)
    text, missing = called([place, RankStatus()], nothing)
    assert missing == (2,) and "Waiting too: rank 1" in text


def test_a_rank_that_raises_for_want_of_another_tells_nothing_new() -> None:
    def change(calls: list[PeerMonitor]) -> None:
        calls[1].describe_missing(CALL, (0,))
        calls[1].raised(CollectiveTimeout("buffer 3: no answer"))
        calls[1].close()

    text, missing = called([waits()], change)
    assert missing == () and "it has given up waiting for buffer 3 (step 12)" in text


def test_a_machine_without_an_address_is_not_known_about(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(hosts: object, env: object) -> str:
        raise OSError("no address")

    names = iter("abc")
    monkeypatch.setattr(addresses, "network", lambda: next(names))  # three machines
    monkeypatch.setattr(addresses, "reachable", none)
    with pytest.warns(UserWarning, match="status port of rank 0 .*no address"):
        text, missing = called([waits(), waits()], nothing)
    assert missing == ()
    assert text.startswith("Not known: rank 1 (host ") and "it has no status port (no address)" in text
    assert "No rank is missing" not in text


def test_what_cannot_be_reached_from_the_start_is_not_said_to_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr(status_server.StatusServer, "port", closed.getsockname()[1], raising=False)
        original = monitor.PeerMonitor._listen

        def elsewhere(self: PeerMonitor, address: str | None, hosts: list[str], env: Any) -> monitor.Peer:
            return monitor.replace(original(self, address, hosts, env), port=closed.getsockname()[1])

        monkeypatch.setattr(monitor.PeerMonitor, "_listen", elsewhere)
        with pytest.warns(UserWarning, match="rank 1 .*status port 127.0.0.1, port .*all TCP ports"):
            text, missing = called([waits(), waits()], nothing)
    assert missing == ()
    assert text.startswith("Not known: rank 1") and "could not be reached" in text
    assert monitor.REFUSED in text and ENDED not in text
    assert "Other ranks report about this rank: " in text and "No rank is missing" not in text


def test_only_the_ranks_of_the_collective_are_asked() -> None:
    text, missing = called([RankStatus(), waits()], lambda calls: calls[1].close(), ranks=(0, 2))
    assert missing == () and "rank 1" not in text and text.startswith("Waiting too: rank 2")


def test_of_many_missing_ranks_the_first_are_described_and_all_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "SHOWN", 2)
    text, missing = called([RankStatus() for _ in range(5)], nothing)
    assert missing == (1, 2, 3, 4, 5)
    assert text.count("(host") == 2 and text.endswith("and ranks 3, 4, 5.")


def test_strangers_are_not_answered_and_do_no_harm() -> None:
    def change(calls: list[PeerMonitor]) -> None:
        peer = calls[1].peers[1]
        for line in (b"GET / HTTP/1.0\r\n\r\n", b'{"token": "?", "rank": 0}\n', b"[]\n", b'{"token": 3}\n', b""):
            with socket.create_connection((peer.address, peer.port), timeout=WAIT) as stranger:
                stranger.sendall(line)
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(100) == b""

    assert called([waits()], change)[1] == ()


def world_of_one() -> LocalBackend:
    return LocalBackend(Group(1), [0], 0)


KILLED = """
import json, os, sys
from agmerge.backends.local import alone
from agmerge.runtime.peers import monitor
monitor.open(0, monitor.over(alone(), 60.0))
peer = monitor._current.peers[0]
if os.fork() == 0:  # as a DataLoader's worker
    sys.stdin.read()  # until the test closes it
    os._exit(0)
print(json.dumps([peer.address, peer.port, peer.token]), flush=True)
os.wait()
"""


def test_a_forked_child_does_not_keep_the_port_of_a_process_that_was_killed() -> None:
    command = [sys.executable, "-c", KILLED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdin is not None and process.stdout is not None
        address, port, token = json.loads(process.stdout.readline())
        assert status_server.query_peer(address, port, token, {"rank": 0})["words"]
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
        with pytest.raises(status_server.PeerUnreachable, match=ENDED):
            status_server.query_peer(address, port, token, {"rank": 0})


def test_opening_another_world_closes_the_first() -> None:
    def servers() -> int:
        return sum(thread.name == "agmerge roll call" for thread in threading.enumerate())

    before = servers()
    for _ in range(3):
        monitor.open(0, over(world_of_one(), WAIT))
        assert servers() == before + 1
        assert status._peer_query is not None
    monitor.close()
    assert servers() == before and status._peer_query is None


def test_an_address_for_others_is_never_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"10.0.0.1": "10.0.0.7", "node-2": "127.0.1.1", "lo": "127.0.0.1", "eth1": "10.9.9.9"}
    monkeypatch.setattr(addresses, "towards", lambda host: found.get(host, ""))
    monkeypatch.setattr(addresses, "of_interface", lambda name: found.get(name, ""))
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth1")])
    assert addresses.reachable(["node-2"], {"MASTER_ADDR": "10.0.0.1"}) == "10.0.0.7"
    assert addresses.reachable(["node-2"], {"MASTER_ADDR": "10.0.0.1", "GLOO_SOCKET_IFNAME": "eth1"}) == "10.9.9.9"
    assert addresses.reachable(["node-2"], {}) == "10.9.9.9"
    del found["eth1"]
    with pytest.raises(OSError, match="this machine has no network address except"):
        addresses.reachable(["node-2"], {})


@pytest.mark.parametrize(
    ("leads_to", "given", "chosen"),
    [
        ("127.0.1.1", None, "eth1"),  # as Debian and Ubuntu write /etc/hosts
        ("::1", None, "eth1"),
        ("10.3.3.3", None, None),  # it leads somewhere: Gloo's choice stands
        ("127.0.1.1", "ib0", "ib0"),  # the user's
    ],
)
def test_gloo_listens_where_others_reach_it_though_its_name_is_a_loopback(
    leads_to: str, given: str | None, chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "of_name", lambda host: leads_to)
    monkeypatch.setattr(addresses, "of_interface", {"lo": "127.0.0.1", "eth1": "10.0.0.7", "ib0": ""}.__getitem__)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth1"), (3, "ib0")])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", given or "")  # set to nothing is not set; it is taken back
    torch_store.choose_interface("10.0.0.7")
    assert os.environ["GLOO_SOCKET_IFNAME"] == (chosen or "")
    advice = torch_store.advice("10.0.0.7")
    assert ("Set GLOO_SOCKET_IFNAME=eth1 on this host" in advice) is (chosen != "eth1")


def test_the_others_addresses_lead_to_this_machines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine of rank 0 has nobody to look for: its own name is a loopback, and no route leads anywhere else."""
    asked: list[str] = []
    monkeypatch.setattr(addresses, "towards", lambda host: asked.append(host) or "")
    monkeypatch.setattr(addresses, "to_master", lambda env: {"a": "", "b": "10.0.0.2"}[socket.gethostname()])
    here = threading.local()
    monkeypatch.setattr(addresses, "network", lambda: here.name)
    monkeypatch.setattr(socket, "gethostname", lambda: here.name)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [])

    def body(rank: int) -> None:
        here.name = "ab"[rank]
        PeerMonitor(rank, over(workers.world(), WAIT), waits(), {}).close()

    with pytest.warns(UserWarning, match="this machine has no network address except"):
        testing.run(2, body)
    assert asked.index("10.0.0.2") < asked.index("b")


def test_this_machine_talks_to_itself_by_way_of_its_loopback() -> None:
    assert addresses.towards("127.0.0.1") == "127.0.0.1"
    assert addresses.towards("no such host.") == ""
    assert addresses.of_interface("lo") in ("127.0.0.1", "")
    assert addresses.of_interface("no such one") == ""
    assert addresses.of_name("localhost") in ("127.0.0.1", "::1")
    assert addresses.of_name("no such host.") == addresses.of_name("192.0.2.1") == "127.0.0.1"
    assert addresses.interface("127.0.0.1") in ("lo", "") and addresses.interface("192.0.2.1") == ""
