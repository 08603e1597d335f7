# SPDX-License-Identifier: Apache-2.0
"""The sparse all-reduce through the whole optimizer: replicas, conservation, calls, changes of membership."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from support import (
    AwkwardModel,
    Parts,
    Sent,
    agreed,
    assert_conserved,
    assert_near,
    digest,
    mlp,
    on_ranks,
    residuals,
    same_bits,
    seeded,
    train,
    trained,
    wrap,
)
from support.awkward_training import backward, wrapped_awkward
from torch import Tensor

from agmerge import testing
from agmerge.exchanges.message import VALUES
from agmerge.planning.cost_probe import Budget, probe
from merging.pieces import run_to_end

AWKWARD, PARTS, MODEL = seeded(AwkwardModel, 7), seeded(Parts), seeded(mlp)
wrapped = functools.partial(wrapped_awkward, exchange="oktopk")


CASES: dict[str, dict[str, Any]] = {
    "behind": {"sparsify": "behind"},
    "ahead": {"sparsify": "ahead"},
    "adtopk": {"compression": "adtopk", "density": 0.1},
    "densities": {"density": {r".*conv.*": 0.2, r".*weight": 0.05}},
    "whole": {"density": 1.0},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_is_sent_and_what_is_kept_is_what_was_there(size: int, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Sent(monkeypatch)

    def body(rank: int, model: AwkwardModel) -> tuple[list[str], int, int]:
        optimizer = wrapped(model, **CASES[case])
        seen, moved, rejected = [], 0, 0
        old: dict[str, Tensor] = {}
        for step in range(12):
            optimizer.zero_grad()
            backward(model, rank, step)
            gradient = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
            new = residuals(optimizer)
            assert_conserved(step, old, gradient, sent.of[rank], new)
            for name, kept in new.items():
                moved += int(sent.of[rank][name].count_nonzero())
                rejected += int(kept.count_nonzero())
            old = new
            seen.append(digest(model))
        assert len(optimizer.plan.counts) > 2
        return seen, moved, rejected

    found = on_ranks(size, AWKWARD, body)
    assert len(set(agreed([seen for seen, _, _ in found]))) == 12
    assert all(moved > 200 for _, moved, _ in found)
    assert case == "whole" or all(rejected > 10_000 for _, _, rejected in found)


CODED = [(3, "oktopk", "int4"), (3, "masked", "fp16")]
CODED += [
    pytest.param(3, exchange, wire, marks=pytest.mark.long)
    for exchange, wires in (("oktopk", VALUES), ("masked", ("int4",)))
    for wire in wires
    if (3, exchange, wire) not in CODED
]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_density_1_trains_as_sparse_does_to_the_bit(size: int) -> None:
    options = {"compression": "topk", "density": 1.0}
    assert trained(size, MODEL, 5, exchange="oktopk", **options) == trained(
        size, MODEL, 5, exchange="sparse", **options
    )


def test_all_ranks_make_the_same_calls_whatever_arrives_when() -> None:
    def body(rank: int, model: AwkwardModel) -> tuple[list[tuple[str, str]], list[str]]:
        optimizer = wrapped(model)
        seen = train(model, optimizer, rank, range(4), backward)
        return [(kind, name) for kind, name, _ in testing.calls()], seen

    runs = [agreed(on_ranks(3, AWKWARD, body, inject=testing.jitter(seed, 2e-4))) for seed in range(3)]
    assert runs[0] == runs[1] == runs[2]
    assert {name.partition("/")[2] for _, name in runs[0][0]} >= {"counts", "pieces", "histogram", "tally", "kept"}


def test_what_is_sent_whole_has_messages_of_its_own() -> None:
    """Small tensors ride in the message of ``sparse``; here every tensor class has its own."""

    def body(rank: int, model: AwkwardModel) -> list[tuple[str, int]]:
        optimizer = wrapped(model)
        backward(model, rank, 0)
        optimizer.step()
        session = optimizer._reducer.exchange.agreed.buffers
        assert session is not None
        routes = [route for buffer in session.messages for route in buffer]
        assert all(len({segment.tensor_class for segment in route.segments}) == 1 for route in routes)
        return [(route.name, len(route.segments)) for route in routes]

    names = [name for name, _ in agreed(on_ranks(2, AWKWARD, body))]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("size", [2, 3])
def test_a_change_of_membership_discards_what_was_under_way_and_repeats_it(size: int) -> None:
    """The unfreezing rank's messages say so; all ranks repeat, and nothing is lost or counted twice."""

    def body(rank: int, model: Parts) -> tuple[list[str], int, Tensor, Tensor, Tensor]:
        model.a.requires_grad_(False)
        optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), exchange="oktopk", compression="topk")
        seen, given, taken, magnitude = [], torch.zeros(()), torch.zeros(()), torch.zeros(())
        for step in range(8):
            optimizer.zero_grad()
            if step == 4:
                model.a.requires_grad_(True)
            model.loss(rank, step, "ab").backward()
            given = given + model.trunk.weight.grad.double()
            magnitude = magnitude + model.trunk.weight.grad.double().abs()
            before = len(testing.calls())
            optimizer.synchronize()
            if step == 4:
                repeated = [name for _, name, _ in testing.calls()[before:]].count("buffer 0")
            taken = taken + model.trunk.weight.grad.double()
            with optimizer.skip_synchronize():
                optimizer.step()
            seen.append(digest(model))
        assert "a.weight" in optimizer.plan.names
        return seen, repeated, given - residuals(optimizer)["trunk.weight"].double(), magnitude, taken

    found = on_ranks(size, PARTS, body)
    assert len(set(agreed([seen for seen, *_ in found]))) == 8
    assert agreed([repeated for _, repeated, *_ in found]) >= 1
    whole, magnitude = (sum(one[part] for one in found) / size for part in (2, 3))
    assert_near(found[0][4], whole, magnitude)


@pytest.mark.parametrize("size", [1, 3])
def test_probes_cost_the_same_calls_and_leave_nothing_behind(size: int) -> None:
    def body(rank: int, model: torch.nn.Module) -> tuple[list[tuple[str, str]], list[str]]:
        optimizer = wrap(model, exchange="oktopk", compression="topk", merging="layerwise")
        twin = train(model, optimizer, rank, range(2))
        kept, before = residuals(optimizer), len(testing.calls())
        session = optimizer._reducer.exchange.agreed.buffers
        assert session is not None
        found = run_to_end(probe(session, 2, 0.01, Budget(0.01, 1 << 20, at_once=True)))
        assert found.sparsify is not None and found.exchange(1000) > 0
        assert all(same_bits(value, kept[name]) for name, value in residuals(optimizer).items())
        calls = [(kind, name) for kind, name, _ in testing.calls()[before:]]
        return calls, twin + train(model, optimizer, rank, range(2, 4))

    calls, seen = agreed(on_ranks(size, MODEL, body))
    assert {name for _, name in calls} >= {"probe", "probe/pieces", "probe/kept", "probe/seconds"}

    def unprobed(rank: int, model: torch.nn.Module) -> list[str]:
        optimizer = wrap(model, exchange="oktopk", compression="topk", merging="layerwise")
        return train(model, optimizer, rank, range(4))

    assert seen == agreed(on_ranks(size, MODEL, unprobed))
