# SPDX-License-Identifier: Apache-2.0
"""Jobs over two hosts, by every launcher, and what is said where the network is wrong: namespaces with an sshd each.

One host's name leads to 127.0.1.1, as Debian and Ubuntu have it, in half of the launches; there both hosts have a
``docker0`` with the same address, too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import two_hosts
from launching import HERE, ROOT, Ended, missing
from two_hosts import Hosts

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

SCRIPT = str(HERE / "on_hosts.py")
PYTHON = sys.executable
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
LIMIT = 120  # seconds for a launch
WAIT = 8  # seconds: AGMERGE_TIMEOUT where the job cannot start
SLACK = 20  # seconds, on a busy machine, for the launcher and the imports too
NETWORK = "10.213.7.0/24"


@pytest.fixture(scope="module", autouse=True)
def possible() -> None:
    """Skip where there can be no hosts."""
    if why := two_hosts.usable():
        pytest.skip(f"no two hosts on this machine: {why}")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Two hosts as they should be."""
    with Hosts(2) as both:
        yield both


@pytest.fixture(scope="module")
def awkward() -> Iterator[Hosts]:
    """Two hosts that lead launchers and libraries astray."""
    with Hosts(2, own="127.0.1.1") as both:
        both.give_all("docker0", "172.17.0.1/16")
        yield both


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hostfile, and a cluster for launch.py."""
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "hostfile").write_text("node0 slots=1\nnode1 slots=1\n")
    settings = ['hosts = ["node0:1", "node1:1"]', f'python = "{PYTHON}"', 'interface = "net0"']
    (folder / "cluster.toml").write_text("\n".join([*settings, "[environment]", f'PYTHONPATH = "{ROOT}"', ""]))
    return folder


def on_both(hosts: Hosts, commands: list[list[str]], **more: str) -> list[Ended]:
    """What becomes of a command on each host, side by side."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda host: hosts.run(host, commands[host], LIMIT, **more), range(2)))


def said(*ended: Ended) -> list[dict[str, Any]]:
    """What the workers have said in all these outputs, in the order of their hosts."""
    lines = [line[line.index("{") :] for one in ended for line in one.output.splitlines() if '"host": ' in line]
    return sorted((json.loads(line) for line in lines), key=lambda one: one["host"])


def check(backend: str, *ended: Ended) -> None:
    """Both were workers of one job, one on each host, and trained to the same parameters: those of every launcher."""
    output = "\n".join(one.output for one in ended)
    assert all(one.code == 0 for one in ended), output
    first, second = said(*ended)
    assert (first["place"], second["place"]) in (([0, 2, 0, 1], [1, 2, 0, 1]), ([1, 2, 0, 1], [0, 2, 0, 1])), output
    assert first["backend"] == second["backend"] == backend and first["told"] == second["told"] == []
    assert first["digest"] == second["digest"]
    digests.add(first["digest"])
    assert len(digests) == 1


digests: set[str] = set()


def needs(launcher: str) -> None:
    if why := missing(launcher):
        pytest.skip(why)


def test_torchrun_meets_at_the_first_host(hosts: Hosts) -> None:
    meeting = ["--rdzv_backend=c10d", "--rdzv_endpoint=node0:29500", "--rdzv_id=1"]
    check("torch", *on_both(hosts, [[*TORCHRUN, *meeting, SCRIPT]] * 2))


def test_torchrun_with_numbered_hosts_whose_names_are_loopbacks(awkward: Hosts) -> None:
    meeting = ["--master_addr=node0", "--master_port=29501"]
    check("torch", *on_both(awkward, [[*TORCHRUN, f"--node_rank={host}", *meeting, SCRIPT] for host in range(2)]))


@pytest.mark.parametrize("launcher, backend", [("torchrun", "torch"), ("mpirun", "horovod"), ("horovodrun", "horovod")])
def test_the_launcher_of_the_examples(awkward: Hosts, files: Path, launcher: str, backend: str) -> None:
    needs(launcher if launcher in ("torchrun", "mpirun") else "horovodrun, MPI")
    given = ["--config", str(files / "cluster.toml"), "--launcher", launcher]
    ssh = ["--ssh"] if launcher == "torchrun" else []
    run = [PYTHON, "examples/launch.py", *given, *ssh, "--", SCRIPT]
    check(backend, awkward.run(0, run, LIMIT))


@pytest.mark.parametrize("controller", ["--gloo", "--mpi"])
def test_horovodrun(awkward: Hosts, files: Path, controller: str) -> None:
    needs(f"horovodrun, {'Gloo' if controller == '--gloo' else 'MPI'}")
    where = ["--hostfile", str(files / "hostfile")] if controller == "--mpi" else ["-H", "node0:1,node1:1"]
    check("horovod", awkward.run(0, ["horovodrun", "-np", "2", *where, controller, PYTHON, SCRIPT], LIMIT))


@pytest.mark.parametrize("backend", ["horovod", "mpi"])
def test_mpirun(awkward: Hosts, files: Path, backend: str) -> None:
    needs("mpirun" if backend == "horovod" else "mpirun, mpi4py")
    run = ["mpirun", "--allow-run-as-root", "-np", "2", "--hostfile", str(files / "hostfile"), "--bind-to", "none"]
    run += ["--mca", "btl_tcp_if_include", NETWORK, "-x", "PYTHONPATH", "-x", "AGMERGE_BACKEND", PYTHON, SCRIPT]
    check(backend, awkward.run(0, run, LIMIT, AGMERGE_BACKEND=backend))


def test_an_mpi_that_tries_docker0_says_which_network_to_name(awkward: Hosts) -> None:
    """It waits there for ever, or ends by itself with what it could not connect to."""
    needs("mpirun, mpi4py")
    run = ["mpirun", "--allow-run-as-root", "-np", "2", "--host", "node0:1,node1:1", "--bind-to", "none"]
    run += ["-x", "PYTHONPATH", "-x", "AGMERGE_BACKEND", "-x", "AGMERGE_TIMEOUT", PYTHON, SCRIPT]
    ended = awkward.run(0, run, LIMIT, AGMERGE_BACKEND="mpi", AGMERGE_TIMEOUT=str(WAIT))
    told = said(ended)
    assert ended.code and (len(told) == 2 or "connect() to 172.17.0.1" in ended.output), ended
    for one in told:
        assert one["error"] == "CollectiveTimeout" and "mpirun --mca btl_tcp_if_include <interface" in one["text"]
        assert WAIT <= one["took"] < WAIT + SLACK


# -- what is wrong with the network -----------------------------------------------------------------------------


def by_hand(hosts: Hosts, master: str, port: int, **more: str) -> list[dict[str, Any]]:
    """What two workers say that were started without a launcher."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": master, "MASTER_PORT": str(port), "AGMERGE_TIMEOUT": str(WAIT), **more}
    with ThreadPoolExecutor() as pool:
        ended = pool.map(lambda rank: hosts.run(rank, [PYTHON, SCRIPT], LIMIT, RANK=str(rank), **common), range(2))
    return said(*ended)


def test_an_interface_that_is_not_there(hosts: Hosts) -> None:
    told = by_hand(hosts, "node0", 29510, GLOO_SOCKET_IFNAME="eth9")
    assert any("has no such interface; it has lo (127.0.0.1), net0 (10.213.7." in one["text"] for one in told), told


def test_an_interface_that_leads_nowhere(awkward: Hosts) -> None:
    for one in by_hand(awkward, "node0", 29511, GLOO_SOCKET_IFNAME="docker0"):
        assert "Gloo listens at 172.17.0.1 (GLOO_SOCKET_IFNAME=docker0)" in one["text"]
        assert "set GLOO_SOCKET_IFNAME=<interface>" in one["text"]


@pytest.mark.parametrize(
    "master, first, second",
    [
        ("node1", "10.213.7.2 refuses connections", "10.213.7.2, this machine itself, refuses connections"),
        ("nosuch", "has no address on this machine. MASTER_ADDR must be an address", "nosuch has no address"),
        ("127.0.0.1", "no sign of rank 1 of 2", "127.0.0.1, this machine itself, refuses connections"),
    ],
)
def test_a_wrong_address_of_rank_0(hosts: Hosts, master: str, first: str, second: str) -> None:
    told = by_hand(hosts, master, 29512)
    assert first in told[0]["text"] and second in told[1]["text"], told
    assert ("it has 10.213.7.1 (net0)" in told[0]["text"]) is (master != "127.0.0.1")
    assert all(one["took"] < WAIT + SLACK for one in told)


@pytest.mark.skipif(bool(two_hosts.blocking()), reason=two_hosts.blocking())
def test_a_port_that_is_blocked(hosts: Hosts) -> None:
    hosts.rules(0, "iifname net0 tcp dport 29513 drop")
    try:
        told = by_hand(hosts, "node0", 29513)
    finally:
        hosts.rules(0)
    assert "no sign of rank 1 of 2" in told[0]["text"]
    assert "port 29513 (MASTER_ADDR, MASTER_PORT)" in told[1]["text"]
    assert "10.213.7.1 does not answer: a firewall drops" in told[1]["text"]
