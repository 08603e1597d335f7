# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of several hosts: rows from what was found, and agents that are asked on this machine."""

from __future__ import annotations

import dataclasses
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from agmerge.__main__ import main
from agmerge.backends.diagnosis import Row
from agmerge.cli import doctor_agent, doctor_hosts, doctor_remote
from agmerge.cli.doctor_host_rows import Found, Link, launching, rows
from agmerge.cli.doctor_remote import HostError, Remote

OWN = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}


def facts(host: str, **changed: Any) -> dict[str, Any]:
    net0 = {"address": OWN[host], "network": "10.0.0.0/24", "speed": 1000}
    found = {
        "host": host,
        "python": "3.11.7",
        "agmerge": "0.1.0",
        "problem": "",
        "loops": "avx512",
        "torch": "2.13.0+cpu",
        "horovod": "0.28.1",
        "mpi4py": "4.1.2",
        "mpirun": "mpirun (Open MPI) 5.0.11",
        "folder": True,
        "networks": {"net0": net0},
        "own": OWN[host],
    }
    return {**found, **changed}


def link(source: str, target: str, **changed: Any) -> Link:
    found = {"error": "", "via": OWN[source], "to": OWN[target], "latency": 2.1e-4, "rate": 9.412e8}
    return Link(source, target, {**found, **changed})


def found(**changed: Any) -> Found:
    """Two hosts on which all is well, but for ``changed``."""
    good = Found(
        "/work",
        facts={host: facts(host) for host in ("a", "b")},
        clocks={"a": (0.0, 0.001), "b": (-0.0001, 0.002)},
        links=[link("a", "b"), link("b", "a")],
    )
    return dataclasses.replace(good, **changed)


def broken(given: Found) -> dict[str, Row]:
    """The rows that do not work, by name; each says what to do."""
    made = rows(given)
    assert all(bool(row.fix) != row.works for row in made)
    return {row.name: row for row in made if not row.works}


def test_where_all_is_well_there_is_nothing_to_do() -> None:
    assert broken(found()) == {}
    details = {(row.kind, row.name): row.detail for row in rows(found())}
    assert details["alike", "torch"] == "2.13.0+cpu on all"
    assert details["alike", "native kernels"] == "AVX-512 on all"
    assert details["clock", "b"] == "+0.000 s from this machine's, give or take 0.002 s"
    assert details["network", "a"] == "net0, 10.0.0.1, 1 Gbit/s"
    assert details["link", "a -> b"] == "0.21 ms, 941 Mbit/s, from 10.0.0.1 to 10.0.0.2"


@pytest.mark.parametrize(
    "why, fix",
    [
        ("root@b: Permission denied (publickey).", "ssh-copy-id b"),
        ("Host key verification failed.", "log in by hand once"),
        ("ssh: Could not resolve hostname b: Name or service not known", "/etc/hosts"),
        ("sh: 1: exec: /opt/python: not found", "at the same place: "),
        ("no answer within 46 s", "make `ssh -o BatchMode=yes b true` work"),
    ],
)
def test_a_host_that_cannot_be_asked(why: str, fix: str) -> None:
    only = found(unreached={"b": why}, facts={"a": facts("a")}, clocks={}, links=[])
    assert broken(only)["b"].detail == why and fix in broken(only)["b"].fix


def test_a_host_on_which_no_worker_could_start() -> None:
    bare = facts("b", problem="ModuleNotFoundError: No module named 'agmerge'", agmerge="")
    assert "install agmerge" in broken(found(facts={"a": facts("a"), "b": bare}))["b"].fix
    elsewhere = broken(found(facts={"a": facts("a"), "b": facts("b", folder=False)}))["b"]
    assert elsewhere.detail == "there is no folder /work" and "same folder" in elsewhere.fix


@pytest.mark.parametrize(
    "name, value, title, detail, fix",
    [
        ("python", "3.10.2", "Python", "3.11.7 on a; 3.10.2 on b", "on b: make it what a has"),
        ("torch", "2.12.1", "torch", "2.13.0+cpu on a; 2.12.1 on b", "-m pip install torch==2.13.0"),
        ("horovod", "", "Horovod", "0.28.1 on a; none on b", "-m agmerge build-horovod"),
        ("mpirun", "mpirun (Open MPI) 4.1.4", "mpirun", "; mpirun (Open MPI) 4.1.4 on b", "make it what a has"),
        ("loops", "none", "native kernels", "AVX-512 on a; none on b", "the slowest host sets the pace"),
        ("loops", "avx2", "native kernels", "AVX-512 on a; AVX2 on b", "python -m agmerge doctor"),
    ],
)
def test_what_differs_between_hosts(name: str, value: str, title: str, detail: str, fix: str) -> None:
    (row,) = broken(found(facts={"a": facts("a"), "b": facts("b", **{name: value})})).values()
    assert row.name == title and row.detail.endswith(detail) and fix in row.fix and row.fix.startswith("on b: ")


def test_a_clock_that_is_off_and_one_of_which_too_little_is_known() -> None:
    late = broken(found(clocks={"a": (1.5, 0.6), "b": (-3.0, 0.5)}))
    assert list(late) == ["b"] and late["b"].detail.startswith("-3.000 s")


def test_an_address_that_several_hosts_have() -> None:
    docker = {"docker0": {"address": "172.17.0.1", "network": "172.17.0.0/16", "speed": None}}
    both = {host: facts(host, networks={**facts(host)["networks"], **docker}) for host in ("a", "b")}
    (row,) = broken(found(facts=both)).values()
    assert row.name == "172.17.0.1" and row.detail.startswith("is docker0 of a and docker0 of b; Open MPI ")
    assert row.fix == "mpirun --mca btl_tcp_if_include 10.0.0.0/24"
    assert "--network-interfaces net0" in launching(found(facts=both))


def test_a_name_of_its_own_that_leads_nowhere_is_said() -> None:
    made = rows(found(facts={"a": facts("a", own="127.0.1.1"), "b": facts("b")}))
    assert [row.detail for row in made if row.kind == "network"][0].endswith("its own name leads to 127.0.1.1")


@pytest.mark.parametrize(
    "error, detail, fix",
    [
        ("silent", "nothing comes back from 10.0.0.2: a firewall", "on b: let a in at all TCP ports, for example: "),
        ("refused", "refused at 10.0.0.2: by a firewall", "iptables -I INPUT -p tcp -s 10.0.0.1 -j ACCEPT"),
        ("[Errno 113] No route to host", "[Errno 113] No route to host (10.0.0.2)", "on b: let a in"),
    ],
)
def test_one_direction_of_a_link_that_is_closed(error: str, detail: str, fix: str) -> None:
    closed = found(links=[link("a", "b", error=error, via=""), link("b", "a")])
    (row,) = broken(closed).values()
    assert row.name == "a -> b" and row.detail.startswith(detail) and fix in row.fix
    assert "btl_tcp_if_include 10.0.0.0/24" in launching(closed)  # by the other direction


@pytest.mark.parametrize("to", ["127.0.1.1", "10.9.9.9", ""])
def test_a_name_that_leads_to_another_machine(to: str) -> None:
    (row,) = broken(found(links=[link("a", "b", error="refused", to=to), link("b", "a")])).values()
    assert row.fix == f"on a: b leads to {to or 'no address'}; its addresses are 10.0.0.2: DNS, /etc/hosts"


def test_interfaces_of_other_names_are_chosen_one_by_one() -> None:
    ib0 = {"ib0": facts("b")["networks"]["net0"]}
    text = launching(found(facts={"a": facts("a"), "b": facts("b", networks=ib0)}))
    assert "on every host its own" in text and "horovodrun" not in text and "10.0.0.0/24" in text
    assert launching(found(links=[])) == "No host reaches another one."


# -- agents -----------------------------------------------------------------------------------------------------


def local(host: str) -> list[str]:
    """An agent of this machine in the place of ``host``: names of the loopback are hosts that need no ssh."""
    return doctor_remote.command("localhost")


@pytest.mark.slow
def test_two_agents_here_are_asked_and_measured() -> None:
    def start(host: str) -> list[str]:
        noise = ["sh", "-c", 'echo "Welcome to $0"; exec "$@"', host]
        return [*noise, *(["env", "AGMERGE_KERNEL=off"] if host == "127.0.0.1" else []), *local(host)]

    seen = doctor_hosts.look(["me@localhost", "127.0.0.1"], 60.0, start)
    assert seen.unreached == {} and list(seen.facts) == ["me@localhost", "127.0.0.1"]
    here, off = seen.facts.values()
    assert here["python"] == sys.version.split()[0] and here["torch"] and here["folder"]
    assert off["loops"] == "none" and {name: off[name] for name in ("torch", "mpirun")} == {
        name: here[name] for name in ("torch", "mpirun")
    }
    assert all(abs(ahead) <= wrong + 0.1 for ahead, wrong in seen.clocks.values())
    ways = [(measured.source, measured.target) for measured in seen.links]
    assert ways == [("me@localhost", "127.0.0.1"), ("127.0.0.1", "me@localhost")]
    for measured in seen.links:
        assert measured.found["error"] == "" and measured.found["rate"] > 0 and measured.found["latency"] > 0


def test_a_host_that_is_lost_on_the_way_is_one_that_is_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(remote: Remote, call: str, timeout: float, **arguments: object) -> Any:
        if call == "clock":
            raise HostError("Connection reset by peer")
        return facts("a")

    monkeypatch.setattr(Remote, "ask", ask)
    seen = doctor_hosts.look(["a"], 1.0, lambda host: ["cat"])
    assert seen.unreached == {"a": "Connection reset by peer"} and not seen.facts and not seen.links


@pytest.mark.slow
def test_why_a_host_does_not_answer() -> None:
    for command, why in (
        (["sh", "-c", "echo 'Permission denied (publickey).' >&2; exit 255"], "Permission denied (publickey)."),
        (["sh", "-c", "exit 3"], "ends with exit code 3"),
        (["sleep", "60"], "no answer within 0.2 s"),
        (["/no/such/program"], "No such file"),
    ):
        with pytest.raises(HostError, match=why.replace("(", r"\(").replace(")", r"\)")):
            with Remote(command) as remote:
                remote.ask("clock", 0.2 if command[0] == "sleep" else 30.0)


def test_what_an_agent_says_of_ports() -> None:
    with Remote(local("a")) as remote, socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        with socket.socket() as waiting:  # there is no place for another
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
            asked = {"host": "127.0.0.1", "patience": 0.3, "seconds": 0.0}
            port = full.getsockname()[1]
            errors = [remote.ask("connect", 30.0, port=port, **asked)["error"] for _ in range(2)]
        full.close()
        assert errors[-1] == doctor_agent.SILENT
        assert remote.ask("connect", 30.0, port=port, **asked)["error"] == doctor_agent.REFUSED
        nowhere = remote.ask("connect", 100.0, **{**asked, "port": port, "host": "no.such.host.invalid"})
        assert nowhere["to"] == "" and nowhere["error"] not in ("", doctor_agent.SILENT, doctor_agent.REFUSED)


@pytest.mark.parametrize("pings", [0, 1, doctor_agent.PINGS])
def test_a_port_that_is_anothers_is_no_error_of_the_agents(pings: int) -> None:
    """Who hangs up before the end is said to; the same where it has sent back some bytes."""
    with socket.create_server(("127.0.0.1", 0)) as other:

        def serve() -> None:
            link, _ = other.accept()
            with link:
                for _ in range(pings):
                    link.sendall(link.recv(1))
                if pings == doctor_agent.PINGS:  # then it reads all, and does not say how much it was
                    for _ in iter(lambda: link.recv(1 << 20), b""):
                        pass

        thread = threading.Thread(target=serve)
        thread.start()
        seen = doctor_agent.connect("127.0.0.1", other.getsockname()[1], 30.0, 0.01)
        thread.join()
    assert "closed by the other end" in seen["error"] or "reset" in seen["error"] or "Broken pipe" in seen["error"]
    assert seen["to"] == "127.0.0.1" and "rate" not in seen


def test_other_hosts_are_asked_over_ssh_without_a_question() -> None:
    run = doctor_remote.command("b")
    assert run[0] == "ssh" and "BatchMode=yes" in run and run[-2] == "b" and sys.executable in run[-1]
    assert len(Path(doctor_agent.__file__).read_bytes()) == int(run[-1].split("read(")[1].split(")")[0])


def test_the_exit_code_says_whether_all_is_well(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for given, code in ((found(), 0), (found(clocks={"a": (9.0, 0.1)}), 1)):
        monkeypatch.setattr(doctor_hosts, "look", lambda hosts, patience, given=given: given)
        assert main(["doctor", "--hosts", "a,b"]) == code
        text = capsys.readouterr().out
        assert "a -> b" in text and ("What to do:" in text) is bool(code)
