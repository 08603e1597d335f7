# SPDX-License-Identifier: Apache-2.0
"""Whole trainings with every coordinate in few bits: on every road ``p.grad`` is what ranks sent, read, to the bit."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from support import agreed, digest, on_ranks, residuals, seeded, wrap
from support.quantised import Net, Step, assert_by_hand, exchanged

import agmerge
import merging
from agmerge import testing
from agmerge.step.config import is_small

MODEL = seeded(Net, 3)
STEPS = 3
QUANTISED = 6 * STEPS  # words, up, down, conv and only_rank_1 of Net; without rank 1 one less


def run(
    size: int,
    body: Callable[[int, Net, Any], Iterable[Step]],
    model: Net = MODEL,
    inject: Callable[[testing.Call], None] | None = None,
    **options: Any,
) -> list[list[Step]]:
    """The steps of all ranks, after which replicas are equal and nothing is kept beside them."""

    def each(rank: int, model: Net) -> tuple[list[Step], str]:
        optimizer = wrap(model, **{"compression": "eden", "check_every": 1, **options})
        steps = list(body(rank, model, optimizer))
        assert not residuals(optimizer)
        return steps, digest(model)

    found = on_ranks(size, model, each, inject=inject)
    agreed([bits for _, bits in found])
    return [steps for steps, _ in found]


def plainly(rank: int, model: Net, optimizer: Any, steps: int = STEPS) -> Iterable[Step]:
    for step in range(steps):
        optimizer.zero_grad()
        yield exchanged(model, optimizer, lambda step=step: model.loss(rank, step).backward())


@pytest.mark.parametrize("compression", ["eden", "eden-1", "eden-3", "eden-4"])
def test_bits(compression: str) -> None:
    assert assert_by_hand(run(3, plainly, compression=compression), compression) == 5 * STEPS


@pytest.mark.parametrize("size", [1, 2, 4, 5, 7])
def test_any_number_of_workers_whoever_comes_first(size: int) -> None:
    ranks = run(size, plainly, inject=testing.jitter(size, 5e-4), merging="layerwise")
    assert assert_by_hand(ranks, "eden") == (5 if size > 1 else 4) * STEPS


# -- roads ------------------------------------------------------------------------------------------------------------


def clipped(rank: int, model: Net, optimizer: Any) -> Iterable[Step]:
    """Clip what was combined: all ranks alike."""
    for step in range(STEPS):
        optimizer.zero_grad()
        seen = exchanged(model, optimizer, lambda step=step: model.loss(rank, step).backward(), clip=0.1)
        yield seen


def accumulated(rank: int, model: Net, optimizer: Any) -> Iterable[Step]:
    """Two backward passes a step, of which the exchange gets the sum."""

    def passes(step: int) -> None:
        for number in range(2):
            model.loss(rank, 2 * step + number).backward()

    for step in range(STEPS):
        optimizer.zero_grad()
        yield exchanged(model, optimizer, lambda step=step: passes(step))


def without_sync(rank: int, model: Net, optimizer: Any) -> Iterable[Step]:
    """The same by the script."""

    def passes(step: int) -> None:
        with optimizer.no_sync():
            model.loss(rank, 2 * step).backward()
        model.loss(rank, 2 * step + 1).backward()

    for step in range(STEPS):
        optimizer.zero_grad()
        yield exchanged(model, optimizer, lambda step=step: passes(step))


def filled(rank: int, model: Net, optimizer: Any) -> Iterable[Step]:
    """Gradients are added up where the last update was written, and made zero."""
    where: set[int] = set()
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        yield exchanged(model, optimizer, lambda step=step: model.loss(rank, step).backward())
        where.add(model.up.weight.grad.data_ptr())
    assert len(where) == 1


def discarded(rank: int, model: Net, optimizer: Any) -> Iterable[Step]:
    """``synchronize()`` without ``step()``: it has never been."""
    for step in range(STEPS):
        optimizer.zero_grad()
        model.loss(rank, 100 + step).backward()
        optimizer.synchronize()
        optimizer.zero_grad()
        yield exchanged(model, optimizer, lambda step=step: model.loss(rank, step).backward())


def broken_off(rank: int, model: Net, optimizer: Any) -> Iterable[Step]:
    """A NaN on one rank: a step that nobody makes."""
    for step in range(STEPS):
        optimizer.zero_grad()
        (model.loss(rank, 100 + step) * (math.nan if rank == step % 2 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield exchanged(model, optimizer, lambda step=step: model.loss(rank, step).backward())
    assert optimizer.stats()["steps_skipped"] == STEPS


def thawing(rank: int, model: Net, optimizer: Any) -> Iterable[Step]:
    """Frozen, thawed and frozen again: ranks agree anew in the step."""
    for step in range(STEPS + 1):
        model.down.requires_grad_(step in (1, 2))
        optimizer.zero_grad()
        yield exchanged(model, optimizer, lambda step=step: model.loss(rank, step).backward())


def reconnected(rank: int, model: Net, optimizer: Any) -> Iterable[Step]:
    """After ``reset()`` ranks connect anew."""
    for step in range(STEPS):
        optimizer.zero_grad()
        yield exchanged(model, optimizer, lambda step=step: model.loss(rank, step).backward())
        optimizer.reset()


def loaded(rank: int, model: Net, optimizer: Any) -> Iterable[Step]:
    """One rank loads its own state between steps."""
    for step in range(STEPS):
        optimizer.zero_grad()
        yield exchanged(model, optimizer, lambda step=step: model.loss(rank, step).backward())
        if rank == 1:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


ROADS: dict[str, tuple[Callable[[int, Net, Any], Iterable[Step]], dict[str, Any]]] = {
    "clipped": (clipped, {}),
    "passes": (accumulated, {"backward_passes_per_step": 2}),
    "no_sync": (without_sync, {}),
    "filled": (filled, {}),
    "discarded": (discarded, {}),
    "skipped": (broken_off, {"nonfinite": "skip", "merging": "layerwise"}),
    "thawing": (thawing, {}),
    "reset": (reconnected, {}),
    "loaded": (loaded, {"merging": "layerwise"}),
    "sum": (plainly, {"op": agmerge.Sum}),
    "predivided": (plainly, {"gradient_predivide_factor": 2.0}),
    "zeros": (plainly, {"unused": "zero"}),
    "patterns": (plainly, {"dense": ["up.*", "conv.*"]}),
    "no small ones": (plainly, {"dense": []}),
    "groups": (plainly, {"groups": 2}),
    "groups by number": (plainly, {"num_groups": 3}),
    "ordered": (plainly, {"dense_sum": "ordered", "merging": merging.get("threshold", bytes=9000)}),
    ": a list must consist of": (plainly, {"compression": ["eden-4", "eden-2"]}),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("road", ROADS)
def test_on_every_road_updates_are_those_made_by_hand(road: str, size: int) -> None:
    body, options = ROADS[road]
    ranks = run(size, body, **options)
    dense = options.get("dense", is_small)
    whole = dense if callable(dense) else lambda name, tensor: any(name.startswith(p[:-2]) for p in dense)
    compression = "eden-4" if road == ": a list must consist of" else "eden"
    assert assert_by_hand(ranks, compression, whole, summed=road == "sum") >= 3 * STEPS
