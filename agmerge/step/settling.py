# SPDX-License-Identifier: Apache-2.0
"""Survivors of a lost worker agree on where they are, and a rank that is ahead gives its results to the others.

Of one group two ranks differ by one round at most, for a round needs a message of everybody. What anybody has received
counts, with the contribution of the lost one; what none has comes to nothing, and is exchanged again. So it is with
functions between two steps (:mod:`agmerge.step.between_steps`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NamedTuple

import torch

from agmerge.backends import Backend
from agmerge.backends.handshake import broadcast_bytes, gather_texts
from agmerge.errors import PeerLost
from agmerge.step.between_steps import NOTHING, Agreed, Between, agreed
from agmerge.step.kept_results import KeptResults, Results


class Position(NamedTuple):
    """Place of a rank in its exchanges: positions are ordered."""

    rounds: int  # that have ended, committed or not
    buffers: int  # merge buffers of the next round that have been received, the first ones of its plan


NEW = Position(-1, 0)  # of a worker that has nothing yet
UNEXPECTED = (
    "AGM212: A worker failed while rank {ranks} was joining, so its state could not be transferred. Restart rank "
    "{ranks}."
)


@dataclass(frozen=True)
class Settled:
    """Outcome: where all ranks are to go on, and the results that this one may need to get there."""

    position: Position
    results: Results  # empty: all ranks are there
    donor: int  # the lowest rank that is there
    new: tuple[int, ...] = ()  # ranks that have nothing yet
    between: Agreed = Agreed()  # on functions between two steps


def settle(
    comm: Backend,
    own: Position,
    kept: KeptResults,
    timeout: float,
    *,
    gives: bool = False,
    between: Between = NOTHING,
) -> Settled:
    """Collective. Return the position from which all ranks of ``comm`` go on: that of the rank that is furthest.

    Args:

        comm: the members of a new group.
        own: this rank's position; ``NEW``: it has nothing yet, and needs the state of another.
        kept: this rank's results; those of the lowest rank that is ahead are broadcast, if any rank needs them.
        timeout: seconds, for each collective.
        gives: newcomers can have this rank's state, which is between two steps.
        between: what this rank does between two steps.

    Raises :class:`agmerge.PeerLost` on every rank where a newcomer is not expected: another worker was lost while it
    was let in.
    """
    said = gather_texts(comm, json.dumps([own, gives, between]).encode(), "positions of survivors", timeout)
    told = [(Position(*position), can_give, Between(*its)) for position, can_give, its in map(json.loads, said)]
    positions = [position for position, _, _ in told]
    old = [one for one in told if one[0] != NEW]
    new = tuple(rank for rank, position in enumerate(positions) if position == NEW)
    if new and not all(can_give for _, can_give, _ in old):
        raise PeerLost(UNEXPECTED.format(ranks=", ".join(map(str, new))), missing=new)
    target, last = (most([position for position, _, _ in old], default=NEW) for most in (max, min))
    donor, data = positions.index(target), b""
    results: Results = {}
    if target != last:
        if comm.rank == donor:
            data = packed(kept.of_round(before=last.rounds < target.rounds))
        results = unpacked(broadcast_bytes(comm, data, donor, "results for survivors", timeout))
    return Settled(target, results, donor, new, agreed([its for _, _, its in told]))


def packed(results: Results) -> bytes:
    """Return ``results`` as bytes, for :func:`unpacked`."""
    names = json.dumps([(name, result.numel()) for name, result in results.items()]).encode()
    return b"".join([len(names).to_bytes(8, "little"), names, *(one.numpy().tobytes() for one in results.values())])


def unpacked(data: bytes) -> Results:
    """Return the results of which :func:`packed` has made ``data``."""
    start = 8 + int.from_bytes(data[:8], "little")
    results, whole = {}, torch.frombuffer(bytearray(data), dtype=torch.uint8)
    for name, length in json.loads(data[8:start]):
        results[name] = whole[start : start + length]
        start += length
    return results
