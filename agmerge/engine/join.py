"""Uneven data: a rank without batches goes on taking part until no rank has any.

A rank that has joined sends what every message asks for, made from its residuals alone, and takes the steps that the
others take. Every message says whether its rank is still going on; the first round in which none is ends it, on every
rank, and is discarded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

from agmerge.backends.handshake import gather_bytes
from agmerge.engine.divergence import digest
from agmerge.engine.reducer import Reducer
from agmerge.errors import DivergenceError
from agmerge.exchanges.message.format import Flag
from agmerge.runtime import workers
from agmerge.runtime.broadcast import broadcast_optimizer_state, broadcast_parameters, plain_state


def join(reducer: Reducer, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> int:
    """Take part without gradients until every rank has joined; the rank that did so last. Collective.

    ``step`` takes a step with the gradients as ``synchronize()`` left them. ``optimizer``: the wrapped one. Of ranks
    that join at the same step the highest counts as the last one. If replicas differ in the end (the others clipped
    their gradients, or changed the learning rate), all get that rank's parameters and optimizer state.
    """
    if reducer.config.model is not None:
        raise ValueError("join() with merging='dear' is not built yet: give every rank the same number of batches")
    reducer.connect()
    reducer.check_idle("join()")
    comm = reducer.exchange.comm
    if comm is None:  # not of the process set
        return workers.rank()
    alone = 0  # steps that this rank has taken without batches
    with reducer.joined():
        while True:
            reducer.synchronize()
            if not reducer.flags_of_all & Flag.ACTIVE:
                break
            step()
            alone += 1
    _discard(reducer)
    texts = gather_bytes(comm, alone.to_bytes(8, "little"), "join", reducer.config.timeout)
    waited = [int.from_bytes(text, "little") for text in texts]
    last = max(rank for rank, steps in enumerate(waited) if steps == min(waited))
    _level(reducer, optimizer, last)
    return _world_rank(reducer, last)


def _discard(reducer: Reducer) -> None:
    """The last round was nobody's step: residuals are as before it, and so is everything else."""
    assert reducer.exchange.buffers is not None
    for parameter in reducer.exchange.buffers.parameters:
        parameter.grad = None
    reducer.discard()


def _level(reducer: Reducer, optimizer: torch.optim.Optimizer, last: int) -> None:
    """Leave every rank with the same parameters and optimizer state."""
    comm = reducer.exchange.comm
    assert comm is not None
    parameters, found = reducer.members.name_all(), hashlib.blake2b(digest_size=16)
    state, tensors = plain_state(optimizer)
    for tensor in (*parameters, *tensors):
        found.update(digest(tensor))
    found.update(repr(state).encode())
    if len(set(gather_bytes(comm, found.digest(), "join/replicas", reducer.config.timeout))) == 1:
        return
    if comm.size < workers.size():
        raise DivergenceError(
            "join(): the ranks of this process set differ after it. Clip gradients and change learning rates in hooks "
            "of the optimizer's step (register_step_pre_hook, register_step_post_hook), which run on ranks that have "
            "joined too"
        )
    broadcast_parameters(parameters, root_rank=last)
    broadcast_optimizer_state(optimizer, root_rank=last)


def _world_rank(reducer: Reducer, rank: int) -> int:
    ranks = reducer.config.process_set.members
    return ranks[rank] if ranks else rank
