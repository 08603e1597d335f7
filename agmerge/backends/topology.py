# SPDX-License-Identifier: Apache-2.0
"""Find out which ranks share a machine, and connect them inside it and across machines."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from agmerge.backends import Backend
from agmerge.backends.handshake import gather_texts

EXCHANGE = "two-level"
VARIABLE = "AGMERGE_LOCAL_SIZE"
ADVICE = (
    "exchange='two-level' requires the same number of workers on each machine, because each worker exchanges one "
    "shard with its counterparts. Start as many workers on each"
)


@dataclass(frozen=True)
class Nodes:
    """Communicators of one rank inside its node and across nodes, and its place there."""

    inside: Backend  # over the ranks of its node
    across: Backend  # over the ranks of its place on every node
    second: Backend | None = None  # another one over these; None: it was not wanted

    @property
    def place(self) -> int:
        """Return this rank's number inside its node: it says which shard is its own."""
        return self.inside.rank

    @property
    def places(self) -> int:
        """Return the number of ranks of a node, which is that of the shards of a tensor."""
        return self.inside.size

    @property
    def shard(self) -> tuple[int, int] | None:
        """Return (place, places); None where there is nothing to share."""
        return (self.place, self.places) if self.places > 1 else None

    @property
    def communicators(self) -> list[Backend]:
        """Return those that there are, in the same order on all ranks."""
        return [comm for comm in (self.inside, self.across, self.second) if comm is not None]


def grouped(hosts: Sequence[str], local_ranks: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each node, ascending, nodes by their first rank. Arguments: of every rank, by rank.

    Two launchers on one host make two nodes: there a local rank occurs twice, and the second one is the second node's.
    """
    launchers: dict[tuple[str, int], int] = {}
    nodes: dict[tuple[str, int], list[int]] = {}
    for rank, place in enumerate(zip(hosts, local_ranks, strict=True)):
        number = launchers[place] = launchers.get(place, -1) + 1
        nodes.setdefault((place[0], number), []).append(rank)
    return list(nodes.values())


def consecutive(workers: int, size: int) -> list[list[int]]:
    """Return nodes of ``size`` ranks each out of ``workers``, the last one with the remaining ones."""
    return [list(range(start, min(start + size, workers))) for start in range(0, workers, size)]


def arranged(places: Sequence[tuple[str, int, str]]) -> list[list[int]]:
    """Return the ranks of each node, from every rank's host, local rank and ``AGMERGE_LOCAL_SIZE``.

    Raises ``ValueError``, the same on every rank, if nodes differ in size or the variable makes no sense.
    """
    sizes = sorted({size for _, _, size in places})
    if len(sizes) > 1:
        raise ValueError(
            f"{VARIABLE} differs between ranks ({', '.join(map(repr, sizes))}). Set the same value on all ranks, or "
            "on none."
        )
    if sizes[0]:
        if not sizes[0].isdigit() or int(sizes[0]) < 1:
            raise ValueError(f"{VARIABLE}={sizes[0]!r}: expected the number of workers of a node, at least 1")
        nodes = consecutive(len(places), int(sizes[0]))
    else:
        nodes = grouped([host for host, _, _ in places], [local for _, local, _ in places])
    if len({len(node) for node in nodes}) > 1:
        shown = "; ".join(f"ranks {', '.join(map(str, node))} on {places[node[0]][0]}" for node in nodes)
        how = f" ({VARIABLE}={sizes[0]})" if sizes[0] else ""
        raise ValueError(f"nodes have different numbers of workers{how}: {shown}. {ADVICE}, or use exchange='sparse'")
    return nodes


def form(comm: Backend, timeout: float, *, wants_second: bool = False) -> Nodes:
    """Collective. Find the nodes of ``comm`` and connect each inside and, place by place, across.

    ``timeout``: seconds, for each message. ``wants_second``: across twice; the same on every rank. Raises
    ``ValueError`` on every rank if nodes differ in size.
    """
    own = json.dumps([socket.gethostname(), comm.local_rank, os.environ.get(VARIABLE, "")]).encode()
    nodes = arranged([tuple(json.loads(text)) for text in gather_texts(comm, own, "nodes", timeout)])
    inside = _one_of(comm, nodes, "inside a node", timeout)
    places = [sorted(ranks) for ranks in zip(*nodes, strict=True)]
    across = _one_of(comm, places, "across nodes", timeout)
    second = _one_of(comm, places, "across nodes, second phases", timeout) if wants_second else None
    return Nodes(inside, across, second)


def _one_of(comm: Backend, groups: Sequence[Sequence[int]], label: str, timeout: float) -> Backend:
    """Collective. Make a communicator over each of ``groups``; return the one that this rank is in."""
    own = None
    for ranks in groups:
        made = comm.subgroup(ranks, label, timeout)
        own = made if made is not None else own
    assert own is not None
    return own
