# SPDX-License-Identifier: Apache-2.0
"""A world in which costs and times of quantisers are what a test says, and what a training chooses in it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import merging
from agmerge.exchanges.routing import send_mode
from agmerge.planning import choice, cost_probe, measuring, plan_trial, replanner
from agmerge.planning.coding import Coding
from agmerge.planning.cost_probe import Budget
from agmerge.planning.measuring import DriftDetector, Finding
from agmerge.planning.replanner import FIRST
from agmerge.runtime import workers
from agmerge.step.merge_buffers import MergeBuffers
from merging import Curve, Pieces
from support import agreed, mlp, on_ranks, seeded, through_a_file, train, wrap

MODEL = seeded(mlp)
SIZES = {"int8": 1.0, "eden-4": 0.5, "eden-2": 0.25, "eden-1": 0.125}  # bytes of an element
TRIAL = 3 * plan_trial.TURN * plan_trial.ROUNDS + 1  # steps of the longest one, and the one after it
LOOK = 10  # steps from look to look
SLOPE = 1.0  # seconds a byte: so much that nothing else of a step counts


def name_of(plan: merging.Plan) -> str:
    """In what it sends: a quantiser's name, or "none"."""
    return "none" if all(plan.dense) else send_mode(plan).quantiser


@dataclass
class World:
    """What is measured in place of times: by name of a candidate, seconds of a step in a trial, and by how much steps
    differ. ``start``: seconds that an exchange takes beside its bytes, which take ``SLOPE`` each. ``dense``: what a
    byte takes that travels as it is, beside one of a quantiser. ``has_changed``: each look finds other times."""

    seconds: dict[str, float] = field(default_factory=dict)
    doubts: dict[str, float] = field(default_factory=dict)
    start: float = 0.0
    dense: float = 1.0
    has_changed: bool = False
    tried: list[list[str]] = field(default_factory=list)  # the candidates of each trial, of rank 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        world = self

        def probe(
            buffers: MergeBuffers, step: int, backward: float, budget: Budget, *_: object
        ) -> Pieces[cost_probe.MeasuredCosts]:
            assert buffers.quantiser is not None
            byte = SLOPE / SIZES[buffers.quantiser.name]  # of a load that is counted in bytes as it is sent now
            slopes = (byte, 4 * SLOPE * world.dense)
            line, whole = (Curve((0, 10**6), (world.start, world.start + slope * 10**6)) for slope in slopes)
            yield from ()
            return cost_probe.MeasuredCosts(
                Curve((0, 1), (0.0, 0.0)), line, whole if buffers.config.chooses_dense else None
            )

        def codings(buffers: MergeBuffers, names: Iterable[str], step: int) -> dict[str, Coding]:
            return {name: Coding(name, SIZES[name]) for name in names}

        class Trial(plan_trial.PlanTrial):
            def __init__(self, *plans: merging.Plan) -> None:
                super().__init__(*plans)
                if workers.world().rank == 0:
                    world.tried.append([name_of(plan) for plan in plans])

            def following(self) -> int:
                return self._turns.index(0) if 0 in self._turns else -1

            def seconds(self) -> list[float]:
                return [world.seconds.get(name_of(plan), 1.0) for plan in self.plans]

            def doubts(self) -> list[float]:
                return [world.doubts.get(name_of(plan), 0.0) for plan in self.plans]

        def look(detector: DriftDetector, *_: object) -> Finding:
            return Finding.PROBE if world.has_changed else Finding.KEEP

        monkeypatch.setattr(DriftDetector, "look", look)
        monkeypatch.setattr(measuring, "measure_costs", probe)
        monkeypatch.setattr(choice, "measure_codings", codings)
        monkeypatch.setattr(replanner, "PlanTrial", Trial)


def wrapped(model: nn.Module, inner: Any = None, **options: Any) -> Any:
    """An optimizer with all four candidates."""
    planner = merging.get("agmerge", check_every=LOOK)
    inner = inner or torch.optim.AdamW(model.parameters(), lr=1e-3)
    return wrap(model, inner, **{"compression": "auto", "exchange": "auto", "merging": planner, **options})


def chosen(size: int, steps: int = FIRST + TRIAL, **options: Any) -> list[str]:
    """In what gradients travel after each step: the same on all ranks."""

    def body(rank: int, model: nn.Module) -> tuple[list[str], list[str]]:
        return trained(rank, model, wrapped(model, **options), range(steps))

    return agreed(on_ranks(size, MODEL, body))[0]


def trained(rank: int, model: nn.Module, optimizer: Any, steps: Iterable[int]) -> tuple[list[str], list[str]]:
    """The same of an optimizer, and the digests of its parameters."""
    names, seen = [], []
    for step in steps:
        seen += train(model, optimizer, rank, [step])
        stats: Mapping[str, Any] = optimizer.stats()
        assert stats["quantiser"] == name_of(optimizer.plan) or optimizer.plan.labels[0].count("quantiser=") == 0
        names.append(stats["quantiser"])
    return names, seen


def resumed(size: int, state: Any, steps: int = 1, **options: Any) -> tuple[list[str], list[str]]:
    """In what gradients travel, and the states of planning, after each step from a checkpoint."""

    def body(rank: int, model: nn.Module) -> tuple[list[str], list[str]]:
        optimizer, names, states = wrapped(model, **options), [], []
        optimizer.load_state_dict(copy.deepcopy(state))
        for step in range(steps):
            names += trained(rank, model, optimizer, [step])[0]
            states.append(optimizer.stats()["planning"])
        return names, states

    return agreed(on_ranks(size, MODEL, body))


def saved(size: int, steps: int = FIRST + 1, state: Any = None) -> Any:
    """Rank 0's checkpoint, of a run that has gone on from ``state``."""

    def body(rank: int, model: nn.Module) -> Any:
        optimizer = wrapped(model)
        if state is not None:
            optimizer.load_state_dict(copy.deepcopy(state))
        train(model, optimizer, rank, range(steps))
        return through_a_file(optimizer.state_dict())

    return on_ranks(size, MODEL, body)[0]
