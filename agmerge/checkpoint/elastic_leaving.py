# SPDX-License-Identifier: Apache-2.0
"""Hand over what a worker that leaves an elastic job has not sent, so that nothing is lost.

It goes to the oldest worker that stays: residuals, and momenta of own gradients, are added to its own. A step is a mean
over workers, and all residuals are scaled to the new number of workers afterwards, so the sum of what is applied and
what is kept stays the same.

Where a worker is lost meanwhile, either all survivors count on the hand-over or none does: nothing is added, and none
leaves, before all have heard of its end (:mod:`agmerge.step.between_steps`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from agmerge.backends import Backend, timeouts
from agmerge.backends.handshake import gather_bytes
from agmerge.checkpoint import rank_state
from agmerge.checkpoint.gather import gather_parts, packed, unpacked
from agmerge.checkpoint.redistribute import displacements, redistribute
from agmerge.engine.reducers import AnyReducer
from agmerge.errors import NoAnswer
from agmerge.ops import Sum
from agmerge.runtime import workers

RANKS_OWN = ("residuals", "momenta")  # a rank's own, linear in gradients


class HandedOver(NamedTuple):
    """Result of one hand-over on one rank."""

    goes: bool  # this rank has said that it leaves
    received: list[dict[str, Any]]  # what others have not sent, if this rank is to take it


def let_worker_go(reducer: AnyReducer, leaves: Callable[[], bool], regroup: Callable[[], None]) -> bool:
    """Collective. Let those leave that want to; return whether this rank is one of them, and is to end now.

    ``leaves``: returns whether this rank wants to. ``regroup``: forms a group of those that are there still. All are
    between two steps, but for some that may have lost the end of the last one, with a worker: then none leaves.
    """
    participation, between = reducer.participation, reducer.exchange.between
    try:
        outcome = participation.handed_over(lambda: hand_over(reducer, workers.world(), leaves=leaves()))
        if outcome is None or outcome.goes:
            return outcome is not None
        for unsent in outcome.received:
            _add(reducer, unsent)
        while between.going:
            _await_end(workers.world())
            regroup()
        return False
    finally:
        between.leave()


def hand_over(reducer: AnyReducer, world: Backend, *, leaves: bool) -> HandedOver:
    """Collective. Give what the ranks of ``world`` that leave have not sent to the first one that stays.

    ``leaves``: this rank does. Nothing changes but what ``reducer.exchange.between`` says. All are between two steps. 4
    bytes a number that is kept travel, to one rank; nothing with settings that keep nothing back.
    """
    between, timeout = reducer.exchange.between, reducer.exchange.agreed.config.guards.timeout
    between.enter(goes=leaves)
    said = [bool(one[0]) for one in gather_bytes(world, bytes([leaves]), "who leaves", timeout)]
    between.hears(sum(said))
    if all(said) or not any(said):
        return HandedOver(leaves, [])
    data = _unsent(reducer) if leaves else b""
    parts = gather_parts(world, data, said.index(False), "what was not sent", timeout)
    return HandedOver(leaves, [unpacked(part) for part in parts or () if part])


def _await_end(world: Backend) -> None:
    """Collective. Wait until workers that leave have left ``world``: they take no part, so it comes to no other end."""
    with suppress(NoAnswer):
        world.barrier("workers leave").wait(timeouts.default())


def _unsent(reducer: AnyReducer) -> bytes:
    """Return what this rank has not sent; empty if that is nothing."""
    section = rank_state.save(reducer)
    unsent: dict[str, Any] = {kind: section[kind] for kind in RANKS_OWN}
    if section["updates"]:
        unsent["displacements"] = displacements(section["updates"], section["residuals"])
    return packed(unsent) if any(unsent.values()) else b""


def _add(reducer: AnyReducer, unsent: dict[str, Any]) -> None:
    """Add what another rank has not sent to what this one has not."""
    own = rank_state.save(reducer)
    other = {**own, **{kind: unsent[kind] for kind in RANKS_OWN}, "window": {}}
    if own["updates"]:
        other["updates"] = {**own["updates"], "own": {}, "displacements": unsent["displacements"]}
    both = redistribute([own, other], 0, 1, Sum)
    kept = {key: own[key] for key in ("rank", "size", "compressor")}
    rank_state.load(reducer, {**both, **kept}, own=True)
