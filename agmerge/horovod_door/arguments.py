# SPDX-License-Identifier: Apache-2.0
"""Arguments of ``horovodrun``, the hosts that they name, and the variables of each worker."""

from __future__ import annotations

import argparse
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import agmerge
from agmerge.backends import addresses, torch_store
from agmerge.horovod_door.distributed_optimizer import VARIABLE
from agmerge.horovod_door.torch_names import VERSION

STAGE = Path(__file__).parent / "stage"
WITHOUT_EFFECT = ("fusion_threshold_mb", "cycle_time_ms", "cache_capacity", "log_level", "disable_cache")
NO_EFFECT = "--{option} has no effect: agmerge merges gradients by a plan of its own, and has no such setting."
NO_AUTOTUNE = (
    "--autotune is not in agmerge: its plans already follow the times that it measures in the first steps. Remove it."
)
NO_COMMAND = "what to run is missing, for example: python -m agmerge horovodrun -np 2 python train.py"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add those arguments of Horovod's launcher that agmerge knows, and agmerge's own two."""
    add = parser.add_argument
    add("-np", "--num-proc", dest="workers", type=int, metavar="N", help="number of workers")
    add("-H", "--hosts", metavar="HOST:SLOTS,...", help="machines, and workers on each (default: all on this machine)")
    add("-hostfile", "--hostfile", metavar="FILE", help="file of machines, one per line: HOST slots=SLOTS")
    add("-p", "--ssh-port", type=int, metavar="PORT", help="port of ssh on other machines")
    add("-i", "--ssh-identity-file", metavar="FILE", help="key of ssh for other machines")
    add("--start-timeout", type=int, default=30, metavar="SECONDS", help="for ssh to connect (default: 30)")
    add("--network-interfaces", "--network-interface", metavar="NAMES", help="network interfaces, for example eth0")
    add("--verbose", action="store_true", help="show each worker's command")
    add("--check-build", "-cb", action="store_true", help="show what moves tensors here, and end")
    add("--gloo", action="store_true", help="connect workers by Gloo, and by NCCL on GPUs (the default)")
    add("--mpi", action="store_true", help="start workers with mpirun")
    add("--min-np", "--min-num-proc", dest="least", type=int, metavar="N", help="elastic: pause with fewer workers")
    add("--max-np", "--max-num-proc", dest="most", type=int, metavar="N", help="elastic: start no more workers")
    add("--host-discovery-script", metavar="FILE", help="elastic: program that prints one HOST:SLOTS per line")
    add("--slots-per-host", type=int, default=1, metavar="N", help="elastic: slots of a HOST without them (default: 1)")
    add("--elastic-timeout", type=int, default=600, metavar="SECONDS", help="elastic: wait for workers (default: 600)")
    add("--reset-limit", type=int, metavar="N", help="elastic: end the job after more changes of its workers")
    add("--timeline-filename", metavar="FILE", help="record a timeline of collectives, as HOROVOD_TIMELINE does")
    add("--timeline-mark-cycles", action="store_true", help="with a mark for every agreement")
    for option, kind in (("fusion-threshold-mb", int), ("cycle-time-ms", float), ("cache-capacity", int)):
        add(f"--{option}", type=kind, help=argparse.SUPPRESS)
    add("--log-level", help=argparse.SUPPRESS)
    add("--disable-cache", action="store_true", help=argparse.SUPPRESS)
    add("--autotune", action="store_true", help=argparse.SUPPRESS)
    add("-v", "--version", action="version", version=VERSION)
    add("--compression", metavar="NAME", help="send gradients so, whatever the script says; default: agmerge's default")
    add("--instead", action="store_true", help="serve horovod.torch also where Horovod is installed")
    add("program", nargs=argparse.REMAINDER, help="what each worker runs, for example: python train.py")


def mistake(given: argparse.Namespace) -> str:
    """Return what is wrong with parsed arguments, in a sentence; empty if nothing is."""
    if given.autotune:
        return NO_AUTOTUNE
    if not given.program:
        return NO_COMMAND
    if not is_elastic(given) and given.workers is None:
        return "-np is missing: the number of workers"
    if given.workers is not None and given.workers < 1:
        return f"-np {given.workers}: expected at least one worker"
    if given.hosts and given.hostfile:
        return "-H and --hostfile both name the machines. Pass one of them"
    if given.mpi and (given.gloo or is_elastic(given)):
        return "--mpi goes neither with --gloo nor with elastic jobs. Remove it"
    if is_elastic(given) and given.workers is None and given.least is None:
        return "-np or --min-np is missing: the number of workers to begin with"
    return ""


def is_elastic(given: argparse.Namespace) -> bool:
    """Return whether workers may come and go."""
    return given.least is not None or given.most is not None or given.host_discovery_script is not None


def without_effect(given: argparse.Namespace) -> list[str]:
    """Return a sentence for each argument that agmerge has no use for."""
    return [NO_EFFECT.format(option=name.replace("_", "-")) for name in WITHOUT_EFFECT if getattr(given, name)]


# Hosts.


@dataclass(frozen=True)
class Host:
    """Machine of a job. ``slots``: workers that it takes, at most."""

    name: str
    slots: int

    @property
    def is_here(self) -> bool:
        """Return whether it is this machine."""
        return self.name in ("localhost", "127.0.0.1", socket.gethostname())


def parse_hosts(text: str, slots: int = 1) -> list[Host]:
    """Return the machines of ``-H``, of a host file, or of what a discovery script prints.

    ``slots``: of a machine that is named without them. Raises ``ValueError`` for a line that names none.
    """
    found = []
    for line in filter(None, (line.partition("#")[0].strip() for line in re.split(r"[,\n]", text))):
        match = re.fullmatch(r"([\w.\-]+)(?:\s*:\s*(\d+)|\s+slots\s*=\s*(\d+))?(?:\s+max[_-]slots\s*=\s*\d+)?", line)
        if match is None:
            raise ValueError(f"{line!r} is no machine. Write HOST:SLOTS, or HOST slots=SLOTS in a file")
        found.append(Host(match[1], int(match[2] or match[3] or slots)))
    return found


def named_hosts(given: argparse.Namespace, number: int) -> list[Host]:
    """Return the machines of ``-H`` or of a host file; this one, with ``number`` slots, where none is named."""
    text = Path(given.hostfile).read_text(encoding="utf-8") if given.hostfile else given.hosts
    return parse_hosts(text, given.slots_per_host) if text else [Host("localhost", number)]


@dataclass(frozen=True)
class Worker:
    """Place of one worker in a job of a fixed number of workers."""

    host: Host
    rank: int
    local_rank: int


def placed(hosts: Sequence[Host], number: int) -> list[Worker]:
    """Return the places of so many workers, host by host. Raises ``ValueError`` where these have too few slots."""
    places = [(host, local) for host in hosts for local in range(host.slots)]
    if len(places) < number:
        raise ValueError(f"-np {number}: the machines have {len(places)} slots. Raise the slots of -H, or lower -np")
    return [Worker(host, rank, local) for rank, (host, local) in enumerate(places[:number])]


# Variables.


def serving(env: Mapping[str, str], compression: str | None) -> dict[str, str]:
    """Return the variables of a process whose ``import horovod`` is served by agmerge. ``env``: of this one."""
    paths = [str(STAGE), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    home = str(Path(agmerge.__file__).resolve().parents[1])
    if home not in paths and not home.endswith(("site-packages", "dist-packages")):
        paths.append(home)  # of a checkout, which the worker would not find
    found = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
    return {**found, VARIABLE: compression} if compression else found


def common(given: argparse.Namespace, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that all workers have."""
    found = serving(env, given.compression)
    if given.network_interfaces:
        found |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), given.network_interfaces)
    if given.timeline_filename:
        found["HOROVOD_TIMELINE"] = given.timeline_filename
        found["HOROVOD_TIMELINE_MARK_CYCLES"] = str(int(given.timeline_mark_cycles))
    return found


def of_worker(worker: Worker, workers: Sequence[Worker], address: str, port: int) -> dict[str, str]:
    """Return the variables of one worker, under torch's names and Horovod's, which scripts read too.

    ``address``, ``port``: where the launcher serves a store.
    """
    beside = [each for each in workers if each.local_rank == worker.local_rank]
    numbers = {
        "RANK": worker.rank,
        "SIZE": len(workers),
        "LOCAL_RANK": worker.local_rank,
        "LOCAL_SIZE": sum(each.host == worker.host for each in workers),
        "CROSS_RANK": beside.index(worker),
        "CROSS_SIZE": len(beside),
    }
    torchs = {"RANK": "RANK", "SIZE": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_RANK", "LOCAL_SIZE": "LOCAL_WORLD_SIZE"}
    found = {f"HOROVOD_{name}": str(number) for name, number in numbers.items()}
    found |= {torchs[name]: str(number) for name, number in numbers.items() if name in torchs}
    places = {"MASTER_ADDR": address, "MASTER_PORT": str(port), torch_store.AGENT: "True"}
    return {**found, **places, "HOROVOD_HOSTNAME": worker.host.name, "AGMERGE_BACKEND": "torch"}


def address_for(hosts: Sequence[Host]) -> str:
    """Return an address of this machine for workers on ``hosts``."""
    return "127.0.0.1" if all(each.is_here for each in hosts) else addresses.reachable([], os.environ)
