# SPDX-License-Identifier: Apache-2.0
"""What only real workers show of gradients in few bits: when calls are made, damage on the way, and what is chosen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from quantised_scenarios import Net, losses, stepped, wrapped
from support import digest, seeded, sgd
from torch import nn

import agmerge
from agmerge.exchanges.quantised.exchange import QuantisedExchange
from agmerge.exchanges.quantised.layout import ShardLayout
from agmerge.exchanges.quantised.two_phase import TwoPhaseExchange

LAYERS, SIDE = 4, 64
PATIENCE = 60.0  # seconds until what only needs time counts as never happening
MOST = 150  # steps by which it has settled: probes may take many where there is little time


class _Calls:
    """What one optimizer starts, in order: ``hook`` before and ``handed`` after each backward pass, ``first`` and
    ``second`` for each collective of a phase."""

    def __init__(self, exchange: QuantisedExchange) -> None:
        self.seen: list[str] = []
        self._follow(exchange.comm, "all_to_all", "first")
        if exchange.context.ranks.second is not None:
            self._follow(exchange.context.ranks.second, "all_gather", "second")

    def _follow(self, backend: Any, call: str, what: str) -> None:
        original = getattr(backend, call)

        def noted(*given: Any) -> Any:
            self.seen.append(what)
            return original(*given)

        setattr(backend, call, noted)


def _layers() -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS))


def _exchange_of(optimizer: Any) -> QuantisedExchange:
    message, *_ = optimizer._reducer.exchange.agreed.buffers.messages[0]
    assert isinstance(message.exchange, QuantisedExchange)
    return message.exchange


def order() -> dict[str, Any]:
    """Whose hooks wait for whom, and when second phases begin: the calls of two steps.

    In the first one the last rank comes to its backward pass when all others are through with theirs. In the second
    one the first phase of each layer has ended on this rank when the next layer's gradient comes.
    """
    rank, size = agmerge.rank(), agmerge.size()
    model = seeded(_layers, 5)
    optimizer = agmerge.DistributedOptimizer(
        sgd(model), model.named_parameters(), compression="eden", merging="layerwise"
    )

    def backward(number: int) -> None:
        (model[number].weight.sum() * (rank + 1)).backward()

    for number in reversed(range(LAYERS)):
        backward(number)
    optimizer.step()
    exchange = _exchange_of(optimizer)
    calls = _Calls(exchange)

    optimizer.zero_grad()
    if rank == size - 1:
        agmerge.barrier()
    for number in reversed(range(LAYERS)):
        backward(number)
    calls.seen.append("handed")
    if rank != size - 1:
        agmerge.barrier()  # the others' last rank has handed over nothing so far: no hook has waited for it
    optimizer.step()
    late = list(calls.seen)

    calls.seen.clear()
    optimizer.zero_grad()
    for number in reversed(range(LAYERS)):
        calls.seen.append("hook")
        backward(number)
        agmerge.barrier()
        first_phase = exchange._first_phase if isinstance(exchange, TwoPhaseExchange) else ()
        until = time.monotonic() + PATIENCE
        while first_phase and not first_phase[-1].handle.done() and time.monotonic() < until:
            time.sleep(1e-3)
    calls.seen.append("handed")
    optimizer.step()
    found = {"late": late, "overlapped": calls.seen, "after": digest(model)}
    optimizer.close()
    return found


def damaged() -> dict[str, str]:
    """One bit of what rank 1 sends flips once its checksum is there, in either phase: what this rank is told."""
    told = {}
    phases = [("first", QuantisedExchange, "start"), ("second", TwoPhaseExchange, "_add_up")]
    for phase, kind, sender in phases[: 1 if agmerge.size() == 2 else 2]:  # among two there is no second one
        model = seeded(Net, 3)
        optimizer = wrapped(model, "layerwise", compression="eden")
        stepped(model, optimizer, losses(model, range(1)))
        before = digest(model)
        with _flipped(kind, sender) if agmerge.rank() == 1 else nullcontext():
            try:
                stepped(model, optimizer, losses(model, range(1, 2)))
                told[phase] = "no error"
            except agmerge.MessageError as error:
                told[phase] = str(error)
        assert digest(model) == before
        optimizer.close()
        agmerge.barrier()
    return told


@contextmanager
def _flipped(kind: type[QuantisedExchange], sender: str) -> Iterator[None]:
    """Flip a bit of the first shard whose header ``sender``, a method of that class, writes inside."""
    write, call = ShardLayout.write_header, getattr(kind, sender)
    is_inside, flipped = [False], []

    def send(self: QuantisedExchange, *given: Any) -> Any:
        is_inside[0] = True
        try:
            return call(self, *given)
        finally:
            is_inside[0] = False

    def written(self: ShardLayout, shard: torch.Tensor, *given: Any, **options: Any) -> None:
        write(self, shard, *given, **options)
        if is_inside[0] and not flipped:
            shard[self.size - 20] ^= 4
            flipped.append(True)

    with mock.patch.object(kind, sender, send), mock.patch.object(ShardLayout, "write_header", written):
        yield
    assert flipped


def chosen() -> dict[str, Any]:
    """What the default settles on here, by its clocks, and again from its checkpoint: the same on all ranks."""
    model = seeded(Net, 3)
    optimizer = wrapped(model, "agmerge")
    seen, states = [], [""]
    while states[-1] != "settled" and len(states) < MOST:
        seen += stepped(model, optimizer, losses(model, [len(states)]))
        states.append(optimizer.stats()["planning"])
    state, stats = optimizer.state_dict(), optimizer.stats()
    found = {"seen": seen, "states": states, "plan": optimizer.plan.dumps(), "quantiser": stats["quantiser"]}
    optimizer.close()
    again = seeded(Net, 3)
    optimizer = wrapped(again, "agmerge")
    optimizer.load_state_dict(state)
    stepped(again, optimizer, losses(again, range(2)))
    found["again"] = [optimizer.plan.dumps(), optimizer.stats()["quantiser"]]
    optimizer.close()
    return found
