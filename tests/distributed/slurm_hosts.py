# SPDX-License-Identifier: Apache-2.0
"""Slurm over the hosts of two_hosts.py: a controller on the first, a daemon on each, keys and state in a folder.

What differs from a real cluster and is not here: accounting, cgroups, PMIx.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from lab import network
from two_hosts import Hosts

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
FOLDERS = "/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin"
CONFIG = """ClusterName=two
SlurmctldHost={first}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
NodeName={nodes} CPUs={cores} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def usable() -> str:
    """Why there can be no Slurm here; empty if there can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=FOLDERS) is None]
    if missing:
        return f"no {', '.join(missing)}: install slurm-wlm and munge"
    return "" if Path("/etc/slurm").is_dir() else "no folder /etc/slurm"


def start(hosts: Hosts, folder: Path) -> None:
    """Start Slurm on ``hosts``, which end it when they are taken down. ``RuntimeError`` if a node does not come up."""
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    names = [hosts.name(host) for host in range(hosts.workers)]
    cores = os.cpu_count() or 1
    text = CONFIG.format(first=names[0], nodes=",".join(names), cores=cores, folder=folder)
    for host in range(hosts.workers):
        etc = network.ETC / hosts.space(host) / "slurm"
        etc.mkdir(exist_ok=True)
        (etc / "slurm.conf").write_text(text, encoding="ascii")
        (etc / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n", encoding="ascii")
    own = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    hosts.start_at(0, ["munged", "-F", "--force", *(f"--{flag}={folder}/munge.{end}" for flag, end in own.items())])
    _wait_for(lambda: (folder / "munge.socket").exists(), "munged")
    hosts.start_at(0, ["slurmctld", "-D"])
    for host in range(hosts.workers):
        hosts.start_at(host, ["slurmd", "-D"])
    _wait_for(lambda: hosts.run(0, ["sinfo", "-h", "-o", "%n %T"], 20).output.count("idle") == hosts.workers, "Slurm")


def _wait_for(ready: Callable[[], bool], what: str, seconds: float = 40.0) -> None:
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise RuntimeError(f"{what} did not start within {seconds:g} s")
        time.sleep(0.2)
