# SPDX-License-Identifier: Apache-2.0
"""Write the file that runs a script under Slurm: text from text, ``sbatch`` reads it.

Workers need no launcher there: ``agmerge.init()`` reads the variables of ``srun``.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from cluster.each import job, value_of
from cluster.hosts import Cluster

NOTICE = 120  # seconds before the end of its time in which a job saves

FILE = """#!/bin/bash
{options}

{exports}export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# Slurm tells this shell alone that the time is nearly over. The workers save and end, and the job waits for its next
# turn. The signal goes to the workers themselves: srun would kill them at a SIGTERM of its own.
trap 'scancel --signal=TERM "$SLURM_JOB_ID"; wait "$workers"; scontrol requeue "$SLURM_JOB_ID"; exit' USR1

# After a requeue, also Slurm's own when a node fails, there is a count of restarts, and the run goes on.
srun --kill-on-bad-exit=1 {program} ${{SLURM_RESTART_COUNT:+--resume}} &
workers=$!
wait "$workers"
"""


def sbatch(cluster: Cluster, script: str, arguments: Sequence[str]) -> str:
    """Return the file for ``script``, whose flags are those of ``train.py``, and which saves at SIGTERM, as it does.

    Without --run-name and --checkpoint-dir both get the job's name and number, which stay when it is requeued. Raises
    ``ValueError`` for nodes that cannot all have the same number of workers.
    """
    name = job(arguments)
    own = f"{name}-$SLURM_JOB_ID"
    more = {"--run-name": own, "--checkpoint-dir": f"checkpoints/{own}"}
    program = shlex.join([cluster.python, script, *arguments])
    options = {
        "job-name": name,
        **_places(cluster),
        "requeue": "",
        "open-mode": "append",
        "output": "%x-%j.out",
        "signal": f"B:USR1@{NOTICE}",
        **{key: value for key, value in cluster.slurm.items() if key != "nodes"},
    }
    return FILE.format(
        options="\n".join(
            f"#SBATCH --{key}={value}" if value else f"#SBATCH --{key}" for key, value in options.items()
        ),
        exports="".join(f"export {key}={shlex.quote(value)}\n" for key, value in cluster.variables().items()),
        program=" ".join(
            [program, *(f'{flag} "{value}"' for flag, value in more.items() if value_of(flag, arguments) is None)]
        ),
    )


def _places(cluster: Cluster) -> dict[str, str]:
    """Return how many nodes there are, and workers on each."""
    hosts = cluster.placed()
    asked = cluster.slurm.get("nodes", "1")
    if not asked.isdigit() or not int(asked):
        raise ValueError(f"nodes={asked} of Slurm's options is no number of nodes")
    nodes = len(hosts) or int(asked)
    if len({host.slots for host in hosts}) > 1 or cluster.workers % nodes:
        raise ValueError(f"{cluster.workers} workers on {nodes} nodes: Slurm gives each node as many; change -np or -H")
    found = {"nodes": str(nodes), "ntasks-per-node": str(cluster.workers // nodes)}
    return {**found, "nodelist": ",".join(host.name for host in hosts)} if hosts else found
