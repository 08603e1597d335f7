# SPDX-License-Identifier: Apache-2.0
"""Training on uneven data: a rank without batches goes on taking part until no rank has any.

A rank that has joined sends all messages, made from its residuals alone, and takes the same steps as the others. Every
message says whether its rank still trains; the first round in which none does is the last one, on every rank, and is
discarded.
"""

from __future__ import annotations

from collections.abc import Callable

from agmerge.backends.handshake import gather_bytes
from agmerge.engine import elastic_refusals
from agmerge.engine.reducer import Reducer
from agmerge.engine.replicas import level_replicas
from agmerge.engine.update_reducer import UpdateReducer
from agmerge.exchanges.message.format import Flag
from agmerge.runtime import workers


def join(reducer: Reducer | UpdateReducer, step: Callable[[], object]) -> int:
    """Collective. Take part without gradients until every rank has joined; return the world's rank that did so last.

    Of ranks that join at the same step the highest counts as the last one. If replicas differ in the end (the others
    clipped their gradients, or changed the learning rate), all get that rank's parameters and optimizer state. Raises
    ``ValueError`` with ``merging="dear"``.

    Args:

        reducer: of the optimizer that joins.
        step: takes a step with the gradients as ``synchronize()`` left them.
    """
    elastic_refusals.refuse_feature("join()")
    if reducer.exchange.agreed.config.sync.model is not None:
        raise ValueError("join() is not supported with merging='dear'. Use the same number of batches on every rank.")
    if not reducer.combines_gradients:
        return join_with_updates(reducer)
    reducer.connect()
    reducer.check_idle("join()")
    comm = reducer.exchange.group.comm
    if comm is None:  # not of the process set
        return workers.rank()
    alone = 0  # steps that this rank has taken without batches
    with reducer.participation.joined():
        while True:
            reducer.synchronize()
            if not reducer.flags_of_all & Flag.ACTIVE:
                break
            step()
            alone += 1
    _discard(reducer)
    last = last_to_join(reducer, alone)
    level_replicas(
        comm, reducer.members, reducer.members.optimizer, last, reducer.exchange.agreed.config.guards.timeout
    )
    return world_rank(reducer, last)


def join_with_updates(reducer: UpdateReducer) -> int:
    """Collective. Send this worker's unsent updates until every rank has joined; then all consolidate.

    The optimizer does not step meanwhile. Returns the world's rank that joined last.
    """
    reducer.before_step()
    if reducer.exchange.group.outside:
        return workers.rank()
    waited = 0
    with reducer.participation.joined():
        while not reducer.exchange.group.alone and reducer.exchange_alone() & Flag.ACTIVE:
            waited += 1
    reducer.consolidate()
    return world_rank(reducer, last_to_join(reducer, waited))


def last_to_join(reducer: Reducer | UpdateReducer, alone: int) -> int:
    """Collective. Return the rank that joined last; of several the highest. ``alone``: steps that this one waited."""
    assert reducer.exchange.group.comm is not None
    texts = gather_bytes(
        reducer.exchange.group.comm, alone.to_bytes(8, "little"), "join", reducer.exchange.agreed.config.guards.timeout
    )
    waited = [int.from_bytes(text, "little") for text in texts]
    return max(rank for rank, steps in enumerate(waited) if steps == min(waited))


def _discard(reducer: Reducer) -> None:
    """Discard the last round, in which no rank has trained: residuals and everything else are as before it."""
    assert reducer.exchange.agreed.buffers is not None
    for parameter in reducer.exchange.agreed.buffers.flat.parameters:
        parameter.grad = None
    reducer.discard()


def world_rank(reducer: Reducer | UpdateReducer, rank: int) -> int:
    """Return the world's number of a rank of the process set."""
    ranks = reducer.exchange.agreed.config.sync.process_set.members
    return ranks[rank] if ranks else rank
