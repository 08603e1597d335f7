# SPDX-License-Identifier: Apache-2.0
"""Plans on a slow link and a busy machine: probes of small messages say little, and dense exchanges are still dear."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from support import on_ranks, seeded
from torch import nn

import agmerge
from agmerge.planning import cost_probe, measuring
from agmerge.planning.cost_probe import MeasuredCosts, MessageTimer, Times
from agmerge.runtime import workers
from merging import Curve, Pieces

RATE = 50e6  # bits a second
WIDTHS = [64, 128, 128, 256, 512]  # tensors of 8192, 16384, 32768 and 131072 elements
MODEL = seeded(lambda: nn.Sequential(*(nn.Linear(a, b) for a, b in zip(WIDTHS, WIDTHS[1:], strict=False))))
LONGEST = 160  # steps until planning has ended, at most


@pytest.fixture
def dense_costs(monkeypatch: pytest.MonkeyPatch) -> list[Curve | None]:
    """Costs of dense exchanges, as rank 0 plans with them."""
    found: list[Curve | None] = []
    measure = measuring.measure_costs

    def recording(*arguments: Any) -> Pieces[MeasuredCosts]:
        costs = yield from measure(*arguments)
        if workers.world().rank == 0:
            found.append(costs.dense)
        return costs

    monkeypatch.setattr(measuring, "measure_costs", recording)
    return found


@pytest.fixture(params=[0.01, 0.02])
def held(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """Seconds that each message of a probe takes at least: other jobs hold its threads up."""
    monkeypatch.setattr(cost_probe, "SHARE", 0.05)  # as in training, so that probes end early
    seconds, send = float(request.param), MessageTimer.send

    def held_up(self: MessageTimer) -> Times:
        began = time.perf_counter()
        times = send(self)
        time.sleep(max(0.0, seconds - (time.perf_counter() - began)))
        return times._replace(travel=max(times.travel, seconds))

    monkeypatch.setattr(MessageTimer, "send", held_up)
    return seconds


@pytest.mark.long  # it times real messages: on a machine with a load of 8 a probe has ended before the largest one
@pytest.mark.usefixtures("held")
def test_a_dense_exchange_is_no_bargain_because_small_messages_were_held_up(dense_costs: list[Curve | None]) -> None:
    """As found with ``sync="updates"``: 0.1 s of a dense exchange were predicted to be 16 ms, and plans went dense."""

    def body(rank: int, model: nn.Module) -> tuple[bool, ...]:
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = agmerge.DistributedOptimizer(inner, model.named_parameters(), sync="updates")
        for _ in range(LONGEST):
            optimizer.zero_grad()
            model(torch.ones(8, WIDTHS[0])).square().mean().backward()
            optimizer.step()
            if optimizer.stats()["planning"] == "settled":
                return optimizer.plan.dense
        raise AssertionError("planning has not ended")

    plans = on_ranks(2, MODEL, body, link=f"{RATE / 1e6:g}mbit")
    numel = sum(parameter.numel() for parameter in MODEL.parameters())
    takes = 4 * 8 * numel / RATE  # an all-reduce of two ranks sends every element once
    assert plans[0] == plans[1] and not any(plans[0])
    assert [dense is not None and dense(numel) > 0.5 * takes for dense in dense_costs] == [True]
