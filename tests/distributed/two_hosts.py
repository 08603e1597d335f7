# SPDX-License-Identifier: Apache-2.0
"""Hosts on one machine: each a network namespace with a name, an address and an sshd of its own, at one switch.

    with Hosts(2) as hosts:
        ended = hosts.run(0, ["mpirun", "-np", "2", "--host", "node0,node1", sys.executable, "train.py"], timeout=60)

What differs between real machines and is not here: files (all hosts have the same), clocks and processors. Needs root,
``ip``, ``tc`` and ``sshd``; a firewall needs ``nft``.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lab import network
from launching import ROOT, Ended, environment, run

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:" + os.environ.get("PATH", os.defpath))
made = itertools.count()  # to tell those of this process apart
NAMED = ["unshare", "--uts", "--", "sh", "-c", 'hostname "$0" && exec "$@"']  # then a host's name, and a command
CLIENT = """Host *
  IdentityFile /etc/ssh/key
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""
SERVER = """HostKey /etc/ssh/host
AuthorizedKeysFile /etc/ssh/key.pub
StrictModes no
PermitRootLogin prohibit-password
UseDNS no
PidFile none
"""


def usable() -> str:
    """Why there can be no such hosts here; empty if there can."""
    missing = [name for name, there in (("sshd", SSHD), ("ssh", shutil.which("ssh"))) if not there]
    return network.usable() or (f"no {' and no '.join(missing)}: install openssh-server" if missing else "")


def blocking() -> str:
    """Why no port can be blocked here; empty if it can."""
    return "" if shutil.which("nft") else "no nft: install nftables"


class Hosts(network.Network):
    """``workers`` hosts, node0 and so on. ``rate``: of each one's port, as tc writes it; None: no limit.

    ``own``: the address that a host finds under its own name: Debian and Ubuntu write 127.0.1.1 where they are
    installed; empty: the one that others find.
    """

    def __init__(self, workers: int = 2, rate: str | None = None, own: str = "") -> None:
        super().__init__(workers, rate)
        self._name += f"nh{next(made)}"  # several at once have namespaces of their own
        self._own = own

    def name(self, host: int) -> str:
        """The name of a host."""
        return f"node{host}"

    def address_of(self, host: int) -> str:
        """The address of a host's ``net0``."""
        return f"10.213.7.{host + 1}"

    def _build(self) -> None:
        super()._build()
        Path("/run/sshd").mkdir(exist_ok=True)  # where sshd locks itself up
        for host in range(self.workers):
            self._write(host)
            self.start_at(host, [str(SSHD), "-D", "-e"])
        for host in range(self.workers):
            self._wait_for_sshd(host)

    def _write(self, host: int) -> None:
        """Write the host's own files of /etc."""
        etc = network.ETC / self.space(host)
        (etc / "ssh").mkdir(parents=True, exist_ok=True)
        lines = [f"{self.address_of(number)} {self.name(number)}" for number in range(self.workers)]
        if self._own:
            lines[host] = f"{self._own} {self.name(host)}"
        (etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]), encoding="ascii")
        (etc / "hostname").write_text(f"{self.name(host)}\n", encoding="ascii")
        (etc / "ssh" / "ssh_config").write_text(CLIENT, encoding="ascii")
        (etc / "ssh" / "sshd_config").write_text(SERVER, encoding="ascii")
        first = network.ETC / self.space(0) / "ssh"
        for name in ("key", "host"):
            if host == 0:
                make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(first / name)]
                subprocess.run(make, check=True, capture_output=True, stdin=subprocess.DEVNULL)
            else:
                shutil.copy2(first / name, etc / "ssh" / name)
                shutil.copy2(first / f"{name}.pub", etc / "ssh" / f"{name}.pub")

    def _wait_for_sshd(self, host: int) -> None:
        """Return once a host lets us in. ``RuntimeError`` if it does not within 20 seconds."""
        end, ended = time.monotonic() + 20, Ended(None, "")
        while ended.code != 0 and time.monotonic() < end:
            ended = self.run(0, ["ssh", "-o", "ConnectTimeout=2", self.name(host), "true"], timeout=10)
        if ended.code != 0:
            raise RuntimeError(f"the sshd of {self.name(host)} does not let us in: {ended.output}")

    def at(self, host: int, command: Sequence[str]) -> list[str]:
        """The command that runs ``command`` on a host."""
        return ["ip", "netns", "exec", self.space(host), *NAMED, self.name(host), *command]

    def start_at(self, host: int, command: Sequence[str], **more: str) -> subprocess.Popen[str]:
        """Start ``command`` on a host, with the programs of this Python first, and no variable of a launcher."""
        started = subprocess.Popen(
            self.at(host, command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            env=variables(**more),
            cwd=ROOT,
            start_new_session=True,
        )
        self._running.append(started)
        return started

    def run(self, host: int, command: Sequence[str], timeout: float, **more: str) -> Ended:  # type: ignore[override]
        """Run ``command`` on a host to its end; after ``timeout`` seconds it is killed, with all that it started."""
        return run(self.at(host, command), timeout, **variables(**more))

    def give_all(self, interface: str, address: str) -> None:
        """Give every host an interface that leads nowhere, with one address for all of them, as Docker does."""
        for host in range(self.workers):
            for words in (
                f"ip link add {interface} type veth peer name {interface}.end",
                f"ip link set {interface}.end up",
                f"ip addr add {address} dev {interface}",
                f"ip link set {interface} up",
            ):
                subprocess.run(self.at(host, words.split()), check=True, capture_output=True)

    def rules(self, host: int, *lines: str) -> None:
        """Let a host's firewall have these rules for what comes in, such as ``tcp dport 29500 drop``; none: no rule."""
        text = "flush ruleset\n"
        if lines:
            chain = "\n".join(["type filter hook input priority 0; policy accept;", *lines])
            text += f"table inet firewall {{\nchain input {{\n{chain}\n}}\n}}\n"
        subprocess.run(self.at(host, ["nft", "-f", "-"]), input=text, text=True, check=True, capture_output=True)


def variables(**more: str) -> dict[str, str]:
    """What a shell of this environment on a host has."""
    path = os.pathsep.join(
        [str(Path(sys.executable).parent), "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
    )
    return {**environment(PYTHONPATH=str(ROOT), PATH=path), **more}
