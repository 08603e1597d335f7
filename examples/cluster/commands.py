# SPDX-License-Identifier: Apache-2.0
"""Return the command lines that start a script's workers: one table of launchers, text from text.

command("mpirun", Cluster(workers=4), "train.py", ["digits"])
"""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cluster.hosts import Cluster

FORWARDED = ("NCCL_", "HOROVOD_", "AGMERGE_", "OMP_")  # variables that begin so go to every worker


def cores(folder: Path = Path("/sys/devices/system/cpu"), allowed: Iterable[int] | None = None) -> int:
    """Return how many cores this process may use; threads of one core count once (Linux; elsewhere all count).

    folder: where the kernel lists processors. allowed: their numbers; None: those of this process.
    """
    if allowed is None:
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    places = [folder / f"cpu{number}" / "topology" / "thread_siblings_list" for number in allowed]
    return len({place.read_text() if place.exists() else str(place) for place in places})


@dataclass(frozen=True)
class Machine:
    """Hold what a command depends on of the machine that launches."""

    name: str = field(default_factory=socket.gethostname)
    root: bool = field(default_factory=lambda: hasattr(os, "geteuid") and os.geteuid() == 0)
    cores: int = field(default_factory=cores)  # Open MPI starts no more workers than these by itself
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))  # the variables that are set

    def forwarded(self) -> dict[str, str]:
        """Return the variables that go to every worker, on whichever host."""
        return {name: self.env[name] for name in sorted(self.env) if name.startswith(FORWARDED)}

    def is_named(self, host: str) -> bool:
        """Tell whether ``host`` is this machine."""
        return host in ("localhost", "127.0.0.1", self.name)


def command(
    launcher: str, cluster: Cluster, script: str, arguments: Sequence[str], machine: Machine | None = None
) -> list[list[str]]:
    """Return the command lines that start ``script`` on ``cluster``: one, or with torchrun one for every host.

    launcher: a key of :data:`LAUNCHERS`. machine: that launches; None: this one. Raises ``ValueError`` for an unknown
    launcher, and for a cluster that it cannot serve.
    """
    if launcher not in LAUNCHERS:
        raise ValueError(f"--launcher {launcher}: there is {', '.join(LAUNCHERS)}, and slurm")
    return LAUNCHERS[launcher](cluster, [script, *arguments], machine or Machine())


def torchrun(cluster: Cluster, program: list[str], machine: Machine) -> list[list[str]]:
    """Return a line for every host, of which the first is where workers meet; a lone host needs no meeting place.

    The rendezvous is static, so that ranks follow the order of the hosts: a rank finds its own checkpoint again.
    """
    program = ["--", *program]  # else torchrun looks for short forms of its own flags there, and finds --run
    run = [cluster.python, "-m", "torch.distributed.run"]
    hosts = cluster.placed()
    if len(hosts) < 2:
        return [[*_variables(cluster, machine, hosts), *run, "--standalone", _workers(cluster.workers), *program]]
    meeting = ["--rdzv_backend=static", f"--rdzv_endpoint={hosts[0].name}:{cluster.port}"]
    return [
        [
            *_variables(cluster, machine, hosts),
            *run,
            f"--nnodes={len(hosts)}",
            f"--node_rank={number}",
            _workers(host.slots),
            *meeting,
            *program,
        ]
        for number, host in enumerate(hosts)
    ]


def horovodrun(cluster: Cluster, program: list[str], machine: Machine) -> list[list[str]]:
    """Return Horovod's own command, which hands all variables to its workers."""
    interface = ["--network-interfaces", cluster.interface] if cluster.interface else []
    run = ["horovodrun", "-np", str(cluster.workers), *_hosts(cluster), *interface, cluster.python]
    return [[*_env(cluster.environment), *run, *program]]


def mpirun(cluster: Cluster, program: list[str], machine: Machine) -> list[list[str]]:
    """Return Open MPI's command, as Horovod's documentation has it; other MPIs know other flags.

    Root and more workers than cores are flags that one would rather not have, so they come only where they are needed.
    """
    run = ["mpirun", "-np", str(cluster.workers), *_hosts(cluster), "--bind-to", "none", "--map-by", "slot"]
    if machine.root:
        run.append("--allow-run-as-root")
    if not cluster.hosts and cluster.workers > machine.cores:
        run.append("--oversubscribe")
    if cluster.interface:
        run += ["--mca", "btl_tcp_if_include", cluster.interface]
    given = cluster.variables()
    exported = ["PATH", "LD_LIBRARY_PATH", *machine.forwarded()]
    words = [name for name in exported if name in machine.env and name not in given]
    words += [f"{name}={value}" for name, value in given.items()]
    return [[*run, *(part for word in words for part in ("-x", word)), cluster.python, *program]]


def alone(cluster: Cluster, program: list[str], machine: Machine) -> list[list[str]]:
    """Return the script's own command: one worker, here."""
    if cluster.workers > 1 or any(not machine.is_named(host.name) for host in cluster.hosts):
        raise ValueError("--launcher alone starts one worker, on this machine; choose torchrun, horovodrun or mpirun")
    return [[*_env(cluster.environment), cluster.python, *program]]


LAUNCHERS: dict[str, Callable[[Cluster, list[str], Machine], list[list[str]]]] = {
    "torchrun": torchrun,
    "horovodrun": horovodrun,
    "mpirun": mpirun,
    "alone": alone,
}


def over_ssh(host: str, folder: str, line: Sequence[str]) -> list[str]:
    """Return the command that runs ``line`` in ``folder`` of ``host`` for as long as its standard input stays open.

    What ssh has started outlives it. So a shell beside it waits for the end of the input, and then sends SIGTERM.
    """
    watch = "exec 3<&0; (read line <&3; kill $$) >/dev/null 2>&1 &"
    return [
        "ssh",
        "-o",
        "BatchMode=yes",
        host,
        f"{watch} cd {shlex.quote(folder)} && exec {shlex.join(line)} </dev/null",
    ]


def _variables(cluster: Cluster, machine: Machine, hosts: Sequence[object]) -> list[str]:
    """Return the variables of a line of torchrun: another host has none of this machine's."""
    return _env({**(machine.forwarded() if hosts else {}), **cluster.variables()})


def _workers(count: int) -> str:
    return f"--nproc_per_node={count}"


def _hosts(cluster: Cluster) -> list[str]:
    return ["-H", ",".join(map(str, cluster.hosts))] if cluster.hosts else []


def _env(variables: Mapping[str, str]) -> list[str]:
    return ["env", *(f"{name}={value}" for name, value in variables.items())] if variables else []
