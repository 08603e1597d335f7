# SPDX-License-Identifier: Apache-2.0
"""exchange="auto": merge buffers go dense or sparse by what that costs, and nothing is lost on the way."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from support import agreed, digest, mlp, on_ranks, seeded, strict_warnings, train, wrap
from torch import nn

import agmerge
import merging
from agmerge.planning import cost_probe, measuring, plan_trial
from agmerge.planning.cost_probe import Budget
from agmerge.planning.replanner import FIRST
from agmerge.step.merge_buffers import MergeBuffers
from merging import Curve, Pieces

MODEL = seeded(mlp)
TENSORS = 6


def costing(sparse: float, dense: float) -> Any:
    """A probe that finds these seconds an element of load and of numel."""

    def probe(
        session: MergeBuffers, step: int, backward: float, budget: Budget, *_: object
    ) -> Pieces[cost_probe.MeasuredCosts]:
        yield from ()
        return cost_probe.MeasuredCosts(Curve((0, 1), (0.0, 0.0)), line(sparse), line(dense) if dense else None)

    return probe


def line(slope: float) -> Curve:
    return Curve((0, 1_000_000), (1e-3, 1e-3 + slope * 1_000_000))


def trained(rank: int, model: nn.Module, steps: int = FIRST, **options: Any) -> agmerge.DistributedOptimizer:
    options = {"compression": "topk", "density": 0.1, "merging": "agmerge", "exchange": "auto", **options}
    optimizer = wrap(model, **options)
    train(model, optimizer, rank, range(steps))
    return optimizer


@pytest.mark.parametrize(("sparse", "dense", "flags"), [(1.0, 1e3, {False}), (1e3, 1e-6, {True})])
def test_what_costs_less_is_taken(sparse: float, dense: float, flags: set[bool], monkeypatch: Any) -> None:
    monkeypatch.setattr(measuring, "measure_costs", costing(sparse, dense))
    plans = on_ranks(2, MODEL, lambda rank, model: trained(rank, model).plan)
    assert plans[0] == plans[1] and set(plans[0].dense) == flags


@pytest.mark.parametrize("trial", [True, False])
def test_going_dense_for_good_is_in_the_figures_with_its_reason(
    trial: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is no warning, for a default asks for it, but a line for those who compare compressors."""
    monkeypatch.setattr(measuring, "measure_costs", costing(*((8.0, 1.0) if trial else (1e3, 1e-6))))
    took = lambda trial: [1.0 if all(plan.dense) else 2.0 for plan in trial.plans]  # noqa: E731
    monkeypatch.setattr(plan_trial.PlanTrial, "seconds", took)

    def body(rank: int, model: nn.Module) -> tuple[bool, str]:
        optimizer = wrap(model, compression="topk", density=0.1, merging="agmerge", exchange="auto", wire="fp32")
        train(model, optimizer, rank, range(FIRST + 5 * plan_trial.TURN * plan_trial.ROUNDS))
        return all(optimizer.plan.dense), optimizer.stats()["exchange_why"]

    with strict_warnings():
        is_dense, why = on_ranks(2, MODEL, body)[0]
    assert is_dense and why.startswith("exchange='auto' compresses if that is faster: ")
    assert ("ms per step with dense" in why) is trial and ("are predicted to be faster" in why) is not trial
    line = capsys.readouterr().err
    assert line.startswith("agmerge: compression='topk' sends all of the gradients uncompressed from step ")
    assert why in line and line.endswith("To compare compressors, add exchange='sparse'\n") and line.count("\n") == 1
    _, alone = on_ranks(1, MODEL, body)[0]
    assert capsys.readouterr().err == ""
    assert alone.endswith("there is one worker, which sends nothing")


def test_reports_say_what_the_plan_sends_whole_whatever_was_named() -> None:
    plan = merging.Plan((4, 2), dense=(True, False))

    def body(rank: int, model: nn.Module) -> tuple[str, str]:
        optimizer = trained(rank, model, 2, merging=plan)
        return optimizer.compression_report(), optimizer.merge_report()

    tensors, buffers = on_ranks(2, MODEL, body)[0]
    rows = [row.split() for row in tensors.splitlines()[1:-1]]
    assert {row[4] for row in rows if row[0] == "0"} == {"uncompressed"}
    assert all((row[4], row[5]) == ("topk", "0.1") for row in rows if row[3] == "sparse" and row[0] == "1")
    assert (
        "are selected from" in tensors
        and "are sent uncompressed, because that is faster here" in tensors.splitlines()[-1]
    )
    assert [row.split()[3] for row in buffers.splitlines()[:3]] == ["sent", "uncompressed", "uncompressed+topk"]


@pytest.mark.parametrize("memory", ["residual", "none"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_merge_buffer_that_goes_dense_sends_all_and_keeps_nothing(size: int, memory: str) -> None:
    plan = merging.Plan((3, 3), dense=(True, False))

    def body(rank: int, model: nn.Module) -> tuple[str, list[float]]:
        optimizer = trained(rank, model, 5, merging=plan, memory=memory)
        kept = optimizer.state_dict()["agmerge"]["residuals"]
        order = list(agmerge.testing.inspect(optimizer).classes)
        return digest(model), [float(kept[name].abs().sum()) if name in kept else 0.0 for name in order]

    found = on_ranks(size, MODEL, body)
    assert len({one[0] for one in found}) == 1
    for _, kept in found:
        assert kept[:3] == [0.0] * 3
        assert (sum(kept[3:]) > 0) == (memory == "residual")


@pytest.mark.parametrize("compression", ["topk", "adtopk", "dgc"])
def test_all_dense_by_plan_is_the_dense_exchange_to_the_bit(compression: str) -> None:
    plan = merging.Plan((2, 4), dense=(True, True))
    momentum = 0.0 if compression == "dgc" else 0.9

    def body(rank: int, model: nn.Module, **options: Any) -> list[str]:
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        options = {"memory": "residual", **options}
        if options["compression"] == "none":
            del options["memory"]
        optimizer = wrap(model, inner, dense_sum="ordered", **options)
        return train(model, optimizer, rank, range(6))

    auto = agreed(on_ranks(2, MODEL, lambda r, m: body(r, m, compression=compression, exchange="auto", merging=plan)))
    dense = agreed(on_ranks(2, MODEL, lambda r, m: body(r, m, compression="none", exchange="sparse")))
    assert auto == dense


def test_from_dense_to_sparse_and_back_residuals_are_sent_in_the_end() -> None:
    """A plan that is changed between steps: what the sparse plan kept, the dense one sends."""

    def body(rank: int, model: nn.Module) -> tuple[float, float]:
        optimizer = trained(rank, model, 4, merging=merging.Plan((6,)))
        before = optimizer.stats()["residual_norm"]
        optimizer._reducer.exchange.agreed.use_plan(merging.Plan((6,), dense=(True,), names=optimizer.plan.names))
        train(model, optimizer, rank, range(4, 5))
        return before, optimizer.stats()["residual_norm"]

    for before, after in on_ranks(2, MODEL, body):
        assert before > 0 and after == 0


@pytest.fixture
def all_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan is given up before its last turn, however long its steps take on this machine."""
    monkeypatch.setattr(plan_trial, "HOPELESS", math.inf)
    monkeypatch.setattr(plan_trial, "SURE", math.inf)


@pytest.mark.usefixtures("all_turns")
@pytest.mark.parametrize("slower", [0, 1])
def test_near_the_trade_off_both_are_tried_and_the_faster_stays(slower: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By turns. When backward's times on this machine fall so, there are two sparse plans beside the dense one."""
    monkeypatch.setattr(measuring, "measure_costs", costing(1e-9, 1e-7))
    took = lambda trial: [1.0 if all(plan.dense) == (slower == 0) else 2.0 for plan in trial.plans]  # noqa: E731
    monkeypatch.setattr(plan_trial.PlanTrial, "seconds", took)

    def body(rank: int, model: nn.Module) -> list[tuple[bool, str]]:
        optimizer = trained(rank, model, FIRST, wire="fp32")
        seen = []
        for step in range(FIRST, FIRST + 3 * plan_trial.TURN * plan_trial.ROUNDS + 1):
            plan = optimizer.plan
            assert plan is not None
            seen.append((all(plan.dense), repr(plan)))
            train(model, optimizer, rank, range(step, step + 1))
        return seen

    seen = agreed(on_ranks(2, MODEL, body))
    tried = list(dict.fromkeys(seen))
    assert {is_dense for is_dense, _ in tried} == {True, False} and len(tried) in (2, 3)
    turns = [plan for plan in tried for _ in range(plan_trial.TURN)] * plan_trial.ROUNDS
    assert seen[: len(turns)] == turns and seen[len(turns)][0] == (slower == 0)


@pytest.mark.usefixtures("all_turns")
def test_a_dense_plan_that_only_looks_faster_is_given_up_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predicted to end a little sooner than plans that compress, of which up to three are tried, by backward's."""
    monkeypatch.setattr(measuring, "measure_costs", costing(2e-8, 1e-9))
    took = lambda trial: [2.0 if all(plan.dense) else 1.0 for plan in trial.plans]  # noqa: E731
    monkeypatch.setattr(plan_trial.PlanTrial, "seconds", took)

    def body(rank: int, model: nn.Module) -> list[tuple[bool, str]]:
        optimizer = wrap(model, compression="topk", density=0.1, merging="agmerge", exchange="auto", wire="fp32")
        seen = []
        for step in range(FIRST + 4 * plan_trial.TURN * plan_trial.ROUNDS + 1):
            train(model, optimizer, rank, range(step, step + 1))
            assert optimizer.plan is not None
            seen.append((all(optimizer.plan.dense), repr(optimizer.plan)))
        return seen[FIRST - 1 :]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seen = agreed(on_ranks(2, MODEL, body))
    tried = list(dict.fromkeys(seen[: seen.index(seen[0], plan_trial.TURN)]))
    assert sum(is_dense for is_dense, _ in tried) == 1 and len(tried) in (2, 3, 4)
    turns = [plan for plan in tried for _ in range(plan_trial.TURN)] * plan_trial.ROUNDS
    assert seen[: len(turns)] == turns and not any(is_dense for is_dense, _ in seen[len(turns) :])


def test_a_dense_plan_that_is_far_behind_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "measure_costs", costing(1e-6, 1.0))

    def body(rank: int, model: nn.Module) -> bool:
        optimizer = trained(rank, model, FIRST + plan_trial.TURN * plan_trial.ROUNDS)
        assert optimizer.plan is not None
        return any(optimizer.plan.dense)

    assert agreed(on_ranks(2, MODEL, body)) is False


def test_with_sparse_there_is_no_choice_and_no_dense_curve() -> None:
    measured = agreed(on_ranks(2, MODEL, lambda r, m: trained(r, m, exchange="sparse").measurements))
    assert measured.dense is None
    measured = agreed(on_ranks(2, MODEL, lambda r, m: trained(r, m).measurements))
    assert measured.dense is not None


@pytest.mark.parametrize("name", [name for name in merging.names() if name != "dear"])
def test_every_planner_has_the_choice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "measure_costs", costing(1e3, 1e-6))
    plans = on_ranks(2, MODEL, lambda rank, model: trained(rank, model, merging=name).plan)
    assert plans[0] == plans[1]
    assert set(plans[0].dense) == {True}
