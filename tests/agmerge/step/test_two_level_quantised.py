# SPDX-License-Identifier: Apache-2.0
"""``exchange="two-level"`` with whole gradients in few bits: dense in a node, quantised between nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import agreed, digest, on_ranks, quantised, seeded, wrap
from support.quantised import Net, by_hand, exchanged
from torch import Tensor

import sparsifiers
from agmerge import testing
from agmerge.backends import topology
from agmerge.exchanges.node_shards import collect, deal, shard_shape
from agmerge.exchanges.quantised.exchange import SEED, number_of
from agmerge.exchanges.routing import send_mode
from agmerge.planning import cost_probe
from agmerge.step.config import is_small
from sparsifiers.quantising.draws import Draws, key_of, mixed

MODEL = seeded(Net, 3)
STEPS = 3
MOST = 100  # steps by which it has settled


def trained(rank: int, model: Net, **options: Any) -> tuple[list[Any], list[str]]:
    optimizer = wrap(model, exchange="two-level", check_every=1, **{"dense_sum": "ordered", **options})
    steps, seen = [], []
    for number in range(STEPS):
        optimizer.zero_grad()
        steps.append(exchanged(model, optimizer, lambda number=number: model.loss(rank, number).backward()))
        seen.append(digest(model))
    return steps, seen


@pytest.mark.parametrize("compression", ["eden", "eden-4", "int8", "auto", "onebit"])
@pytest.mark.parametrize("grid", [(2, 2), (3, 2), (2, 1), (1, 3)], ids=str)
def test_replicas_are_equal_to_the_bit(grid: tuple[int, int], compression: str, monkeypatch: Any) -> None:
    monkeypatch.setenv(topology.VARIABLE, str(grid[1]))
    size = grid[0] * grid[1]
    found = on_ranks(
        size, MODEL, lambda r, m: trained(r, m, compression=compression), inject=testing.jitter(size, 2e-4)
    )
    assert len(set(agreed([seen for _, seen in found]))) == STEPS


def shards(tensor: Tensor, places: int) -> list[Tensor]:
    """What each rank of a node has of it."""
    part = shard_shape(tensor.shape, places)
    rows = torch.zeros(places, int(torch.Size(part).numel()), dtype=tensor.dtype)
    deal(tensor, rows)
    return [row.view(part) for row in rows]


@pytest.mark.parametrize("compression", ["eden", "int8"])
def test_updates_are_those_made_by_hand_of_what_nodes_add_up(compression: str, monkeypatch: Any) -> None:
    places, quantiser, checked = 2, sparsifiers.quantiser(compression), 0
    monkeypatch.setenv(topology.VARIABLE, str(places))
    found = on_ranks(4, MODEL, lambda r, m: trained(r, m, compression=compression))
    for steps in zip(*(steps for steps, _ in found), strict=True):
        for name, update in steps[0].updates.items():
            given = [step.gradients[name] for step in steps]
            if update is None or is_small(name, update) or all(gradient is None for gradient in given):
                continue
            whole = [torch.zeros(update.shape) if gradient is None else gradient for gradient in given]
            nodes = [shards(whole[first] + whole[first + 1], places) for first in (0, 2)]
            rows = []
            for place in range(places):
                monkeypatch.setattr(quantised, "draws", draws_at(place))
                parts = [node[place] for node in nodes]
                rows.append(by_hand(name, parts, steps[0].number, quantiser, summed=True).reshape(-1) / 4)
            wanted = torch.empty(update.shape)
            collect(torch.stack(rows), wanted)
            assert torch.equal(update, wanted), name
            checked += 1
    assert checked == 5 * STEPS


def draws_at(place: int) -> Any:
    """Return the random words of the shards of one place: a function of those of whole tensors' arguments."""

    def draws(name: str, step: int, phase: int, sender: int) -> Draws:
        return Draws(mixed(key_of(SEED, step, phase, sender, *([place] if place else [])) ^ number_of(name)))

    return draws


def test_between_nodes_the_default_chooses_among_what_is_compressed(monkeypatch: Any) -> None:
    monkeypatch.setenv(topology.VARIABLE, "2")
    monkeypatch.setattr(cost_probe, "SECONDS", 0.1)
    monkeypatch.setattr(cost_probe, "SHARE", 1e3)  # plans need not be good ones, and soon

    def body(rank: int, model: Net) -> tuple[Any, ...]:
        optimizer = wrap(model, compression="auto", exchange="two-level", merging="agmerge")
        first = optimizer._reducer.exchange.agreed.config.compression.compressor.until_chosen
        seen, states = [], [""]
        while states[-1] != "settled" and len(states) < MOST:
            optimizer.zero_grad()
            model.loss(rank, len(states)).backward()
            optimizer.step()
            states.append(optimizer.stats()["planning"])
            seen.append(digest(model))
        return first, seen, states[-1], optimizer.plan, optimizer.stats()["quantiser"]

    first, _, state, plan, name = agreed(on_ranks(4, MODEL, body))
    assert first == "eden-4" and state == "settled" and not any(plan.dense)
    assert (send_mode(plan).quantiser, send_mode(plan).workers) == (name, 4) and name in ("int8", "eden-4", "eden-2")
