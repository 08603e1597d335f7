# SPDX-License-Identifier: Apache-2.0
"""Show whether hosts can work together: ``python -m agmerge doctor --hosts a,b``.

A job over several machines needs: ssh that lets in without a question, the same environment at the same place, clocks,
and a fast network that leads to all of them, without a firewall on it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from agmerge.cli import doctor_agent, doctor_remote
from agmerge.cli.doctor import table
from agmerge.cli.doctor_host_rows import Found, Link, launching, rows
from agmerge.cli.doctor_remote import HostError, Remote

PATIENCE = 3.0  # seconds for a connection
SENDING = 1.0  # seconds that are sent on each link
LOOKS = 5  # at a clock; the fastest answer counts

Start = Callable[[str], Sequence[str]]  # from a host's name to the command that starts the agent there


def main(hosts: Sequence[str], patience: float) -> int:
    """Print the table of ``hosts``; return 0 if all of it works, else 1. ``patience``: seconds for each program."""
    found = look(hosts, patience)
    made = rows(found)
    sys.stdout.write(f"{table(made, 'What to do:')}\n")
    if found.links:
        sys.stdout.write(f"\n{launching(found)}\n")
    return 0 if all(row.works for row in made) else 1


def look(hosts: Sequence[str], patience: float, start: Start = doctor_remote.command) -> Found:
    """Return the findings about ``hosts`` and the links between them.

    ``patience``: seconds for each program that is started on a host. ``start``: the command of an agent.
    """
    found, remotes = Found(os.getcwd()), dict[str, Remote]()
    limit = 3 * patience + doctor_remote.CONNECT  # for three programs, and ssh
    with ExitStack() as stack, ThreadPoolExecutor(len(hosts)) as pool:

        def facts(host: str) -> Mapping[str, Any]:
            remotes[host] = stack.enter_context(Remote(start(host)))
            answer: Mapping[str, Any] = remotes[host].ask("facts", limit, folder=found.folder, patience=patience)
            return answer

        ports = dict[str, int]()
        for host, answer in [(host, pool.submit(facts, host)) for host in hosts]:
            try:
                told = answer.result()
                found.clocks[host] = clock(remotes[host])
                ports[host] = int(remotes[host].ask("listen", doctor_remote.CONNECT))
                found.facts[host] = told
            except HostError as error:
                found.unreached[host] = str(error)
        found.links.extend(links(remotes, ports, pool))
    return found


def clock(remote: Remote) -> tuple[float, float]:
    """Return by how many seconds a host's clock is ahead of ours, and by how many that may be wrong."""
    looks = []
    for _ in range(LOOKS):
        before = time.time()
        theirs = float(remote.ask("clock", doctor_remote.CONNECT))
        after = time.time()
        looks.append(((after - before) / 2, theirs - (before + after) / 2))
    wrong, ahead = min(looks)
    return ahead, wrong


def links(remotes: Mapping[str, Remote], ports: Mapping[str, int], pool: ThreadPoolExecutor) -> list[Link]:
    """Return the link from each host to each other one; from each to the next also its speed, one by one.

    ``ports``: where the agents listen, by host, of those that do.
    """
    names = list(ports)

    def connect(source: str, target: str, seconds: float) -> Link:
        asked = {"host": target.rpartition("@")[2], "port": ports[target], "patience": PATIENCE, "seconds": seconds}
        try:
            return Link(source, target, remotes[source].ask("connect", 2 * doctor_agent.SLOW, **asked))
        except HostError as error:
            return Link(source, target, {"error": str(error), "to": "", "via": ""})

    def connect_to_all(source: str) -> list[Link]:
        return [connect(source, target, 0.0) for target in names if target != source]

    made = [link for found in pool.map(connect_to_all, names) for link in found]
    next_of = dict(zip(names, [*names[1:], *names[:1]], strict=True))

    def timed(link: Link) -> Link:
        wanted = next_of[link.source] == link.target and not link.found["error"]
        return connect(link.source, link.target, SENDING) if wanted else link

    return [timed(link) for link in made]
