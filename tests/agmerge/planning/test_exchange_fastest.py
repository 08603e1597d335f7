# SPDX-License-Identifier: Apache-2.0
"""exchange="fastest": what is selected is combined as steps are shortest, and nothing is lost on the way."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from support import Sent, agreed, conserving, loss_of, mlp, on_ranks, seeded, train, wrap
from torch import nn

from agmerge import testing
from agmerge.exchanges.routing import SUMS, SendMode, send_mode, with_send_mode
from agmerge.planning import cost_probe, measuring, plan_trial
from agmerge.planning.cost_probe import Budget
from agmerge.planning.replanner import FIRST
from agmerge.step.merge_buffers import MergeBuffers
from merging import Curve, Pieces

MODEL = seeded(mlp)
STEPS = FIRST + 7 * plan_trial.TURN * plan_trial.ROUNDS + 2  # with three codecs, all compressed, the plan in use
Link = dict[str, float]


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Link:
    """Seconds to start an exchange, and of an element, in place of what is measured; of a dense one, too."""
    costs = {"start": 1e-3, "element": 1.0, "dense": 1.0}

    def probe(
        buffers: MergeBuffers, step: int, backward: float, budget: Budget, *_: object
    ) -> Pieces[cost_probe.MeasuredCosts]:
        lines = [Curve((0, 10**6), (costs["start"], costs["start"] + costs[of] * 10**6)) for of in ("element", "dense")]
        yield from ()
        return cost_probe.MeasuredCosts(Curve((0, 1), (0.0, 0.0)), *lines)

    monkeypatch.setattr(measuring, "measure_costs", probe)
    for what in ("POINTS", "BINS"):  # beside which nothing counts that this model sends
        monkeypatch.setattr(f"agmerge.exchanges.routing.{what}", 0)
    return costs


@pytest.fixture(autouse=True)
def trial(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds of a step with each exchange, in place of what is measured."""
    seconds = {"auto": 3.0, "masked": 1.0, "oktopk": 2.0}

    def measured(trial: plan_trial.PlanTrial) -> list[float]:
        return [seconds[send_mode(plan).exchange] + all(plan.dense) for plan in trial.plans]

    monkeypatch.setattr(plan_trial.PlanTrial, "seconds", measured)
    return seconds


def exchanges(size: int, **options: Any) -> list[str]:
    """Train; the exchange after each step, the same on all ranks, as are their calls and replicas."""

    def body(rank: int, model: nn.Module) -> tuple[list[str], Any, list[str]]:
        options_ = {"compression": "topk", "density": 0.1, "merging": "agmerge", "exchange": "fastest", **options}
        optimizer = wrap(model, **options_)
        found, seen = [], []
        for step in range(STEPS):
            seen += train(model, optimizer, rank, [step])
            found.append(optimizer.stats()["exchange"])
        return found, [call[:2] for call in testing.calls()], seen  # oktopk's have as many bytes as it takes

    found, _, seen = agreed(on_ranks(size, MODEL, body))
    assert len(set(seen)) == STEPS
    return found


@pytest.mark.parametrize("fastest", ["masked", "oktopk", "auto"])
@pytest.mark.parametrize("size", [3, 4])
def test_the_one_with_the_shortest_steps_is_taken(size: int, fastest: str, link: Link, trial: Link) -> None:
    trial[fastest] = 0.5
    found = exchanges(size)
    assert set(found[:FIRST]) == {"auto"} and found[-1] == fastest
    assert set(found) == {"auto", *SUMS}  # each has had its turn


def test_what_is_hopeless_is_not_tried(link: Link) -> None:
    link.update(start=1.0, element=1e-9)  # rounds are what costs
    assert set(exchanges(3)) == {"auto"}


@pytest.mark.parametrize("exchange", ["auto", "sparse"])
def test_nobody_else_asks_for_it(exchange: str, link: Link) -> None:
    assert set(exchanges(3, exchange=exchange)) == {exchange}


@pytest.mark.parametrize("wire", ["auto", "int8", "sign"])
def test_a_wire_goes_along_where_it_can(wire: str, link: Link) -> None:
    found = set(exchanges(3, wire=wire))
    assert found == ({"auto", "oktopk"} if wire == "sign" else {"auto", *SUMS})


def test_nothing_is_lost_on_the_way(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Sent(monkeypatch)

    def body(rank: int, model: nn.Module) -> Any:
        optimizer = wrap(model, compression="topk", density=0.1, merging="agmerge", exchange="fastest", wire="fp32")
        found = conserving(model, optimizer, lambda step: loss_of(model, rank, step), STEPS, sent)
        return found, optimizer.stats()["exchange_why"]

    (seen, plans), why = agreed(on_ranks(3, MODEL, body))
    assert {send_mode(plan).exchange for plan in plans} == {"auto", *SUMS} and len(set(seen)) == STEPS
    assert "1e+03 ms per step with masked" in why and "3e+03 ms per step with sparse" in why


def test_training_goes_on_with_it_to_the_bit(link: Link) -> None:
    options = {"compression": "topk", "density": 0.1, "merging": "agmerge", "exchange": "fastest"}

    def body(rank: int, model: nn.Module) -> Any:
        optimizer = wrap(model, **options)
        train(model, optimizer, rank, range(STEPS))
        again = copy.deepcopy(model)
        state = copy.deepcopy(optimizer.state_dict())
        seen = train(model, optimizer, rank, range(STEPS, STEPS + 3))
        restored = wrap(again, **options)
        restored.load_state_dict(state)
        assert train(again, restored, rank, range(STEPS, STEPS + 3)) == seen
        # With another exchange the plan stays, and that is what it is exchanged by.
        other = wrap(copy.deepcopy(model), **{**options, "exchange": "sparse"})
        other.load_state_dict(state)
        train(model, other, rank, [])
        return seen, restored.stats()["exchange"], send_mode(restored.plan).exchange

    assert agreed(on_ranks(3, MODEL, body))[1:] == ("masked", "masked")


def test_labels_say_it() -> None:
    assert SendMode.parse("ahead wire=int8 exchange=masked") == SendMode(True, "int8", "masked")
    assert SendMode.parse(SendMode(False, "int8", "oktopk").label) == SendMode(False, "int8", "oktopk")
    with pytest.raises(ValueError, match="has the word 'exchange=sparse'; there are"):
        SendMode.parse("exchange=sparse")


def test_a_plan_in_parts_has_none_with_such_an_exchange() -> None:
    import merging

    plan = merging.Plan((2, 1), parts=(2, 1))
    assert with_send_mode(plan, exchange="masked").parts == (1, 1)
    assert with_send_mode(plan, exchange="auto") == plan
