# SPDX-License-Identifier: Apache-2.0
"""Hand over what a worker that leaves an elastic job has not sent, so that nothing is lost.

It goes to the oldest worker that stays: residuals, and momenta of own gradients, are added to its own. A step is a mean
over workers, and all residuals are scaled to the new number of workers afterwards, so the sum of what is applied and
what is kept stays the same.
"""

from __future__ import annotations

from typing import Any

from agmerge.backends import Backend
from agmerge.backends.handshake import broadcast_bytes, gather_bytes
from agmerge.checkpoint import rank_state
from agmerge.checkpoint.gather import packed, unpacked
from agmerge.checkpoint.redistribute import displacements, redistribute
from agmerge.engine.reducers import AnyReducer
from agmerge.ops import Sum

OWN = ("residuals", "momenta")  # a rank's own, linear in gradients


def hand_over(reducer: AnyReducer, world: Backend, *, leaves: bool) -> None:
    """Collective. Give what the ranks of ``world`` that leave have not sent to the first one that stays.

    ``leaves``: this rank does. All are between two steps. 4 bytes a number that is kept travel, to one rank; nothing
    with settings that keep nothing back.
    """
    timeout = reducer.exchange.agreed.config.guards.timeout
    said = gather_bytes(world, bytes([leaves]), "who leaves", timeout)
    leaving, staying = ([rank for rank, one in enumerate(said) if bool(one[0]) is what] for what in (True, False))
    for rank in leaving if staying else ():
        pair = world.subgroup([rank, staying[0]], "of one that leaves", timeout)
        if pair is not None:
            data = broadcast_bytes(pair, _unsent(reducer) if leaves else b"", 0, "what was not sent", timeout)
            if not leaves and data:
                _add(reducer, unpacked(data))
            pair.drop()
    world.barrier("what was not sent is there").wait(timeout)


def _unsent(reducer: AnyReducer) -> bytes:
    """Return what this rank has not sent; empty if that is nothing."""
    section = rank_state.save(reducer)
    unsent: dict[str, Any] = {kind: section[kind] for kind in OWN}
    if section["updates"]:
        unsent["displacements"] = displacements(section["updates"], section["residuals"])
    return packed(unsent) if any(unsent.values()) else b""


def _add(reducer: AnyReducer, unsent: dict[str, Any]) -> None:
    """Add what another rank has not sent to what this one has not."""
    own = rank_state.save(reducer)
    other = {**own, **{kind: unsent[kind] for kind in OWN}, "window": {}}
    if own["updates"]:
        other["updates"] = {**own["updates"], "own": {}, "displacements": unsent["displacements"]}
    both = redistribute([own, other], 0, 1, Sum)
    kept = {key: own[key] for key in ("rank", "size", "compressor")}
    rank_state.load(reducer, {**both, **kept}, own=True)
