# SPDX-License-Identifier: Apache-2.0
"""Merge buffers in several messages, in training: nothing is lost, replicas agree, and times are put to use."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support import (
    AwkwardModel,
    Sent,
    agreed,
    awkward_batch,
    awkward_groups,
    conserving,
    digest,
    loss_of,
    mlp,
    on_ranks,
    residuals,
    same_bits,
    seeded,
    sgd,
    through_a_file,
    train,
    trained,
    wrap,
)
from torch import nn

import agmerge
import merging
import sparsifiers
from agmerge import testing
from agmerge.backends import topology
from agmerge.metrics.step_times import Event, StepRecorder
from agmerge.planning import choice, measuring
from agmerge.planning.cost_probe import MeasuredCosts
from agmerge.planning.replanner import FIRST
from agmerge.step.round import Round
from merging import Curve, Plan

MODEL, AWKWARD = seeded(mlp), seeded(AwkwardModel, 7)
LAYERWISE = Plan((1,) * 6, labels=("ahead",) * 6, parts=(1, 1, 1, 4, 1, 4))


@dataclass(frozen=True, repr=False, kw_only=True)
class InParts(merging.Planner):
    """One merge buffer in so many messages."""

    name: ClassVar[str] = "in-parts"
    timed: ClassVar[bool] = False
    number: int

    def partition(self, profile: merging.Profile, costs: merging.Costs, mode: str) -> Plan:
        return Plan((len(profile),), parts=(self.number,))


def messages() -> int:
    """How many different messages of merge buffers this rank has sent so far."""
    return len({name for _, name, _ in testing.calls() if name.startswith("buffer ") and "/" not in name})


def inner(model: nn.Module, compression: str) -> torch.optim.Optimizer:
    return sgd(model, momentum=0.0 if compression == "dgc" else 0.9)


# -- what always holds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [Plan((6,), parts=(2,)), Plan((6,), parts=(4,)), LAYERWISE], ids=["2", "4", "ahead"])
@pytest.mark.parametrize("compression", sparsifiers.names())
def test_nothing_is_lost_and_replicas_agree(compression: str, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Sent(monkeypatch)

    def body(rank: int, model: nn.Module) -> tuple[list[str], int, int]:
        options = {"compression": compression, "memory": "residual", "density": 0.1}
        optimizer = wrap(model, merging=plan, **options)
        seen, _ = conserving(model, optimizer, lambda step: loss_of(model, rank, step), 4, sent)
        return seen, messages(), optimizer.stats()["buffers"]

    seen, count, buffers = agreed(on_ranks(3, MODEL, body))
    assert len(set(seen)) == 4
    assert (count, buffers) == (sum(plan.parts), len(plan.counts))


@pytest.mark.parametrize("compression", ["topk", "adtopk", "adtopk-row", "dgc"])
def test_each_part_has_its_own_budget(compression: str) -> None:
    """Not more than ceil(density * part) of each, and every part of them heard."""

    def body(rank: int, model: nn.Module) -> list[tuple[int, int, int]]:
        optimizer = wrap(model, inner(model, compression), merging=Plan((6,), parts=(4,)), compression=compression)
        train(model, optimizer, rank, range(3))
        session = optimizer._reducer.exchange.agreed.buffers
        assert session is not None
        pieces = [part for route in session.messages[0] for part in route.segments if part.tensor_class.sparse]
        assert len({name for name in session.keys() if name.startswith("2.weight")}) == len(pieces[:2])
        shapes = [session.vector(session.flat.operands(part), 0)[2] for part in pieces]
        budgets = [session.budgets.of_segment(part, 0) for part in pieces]
        return [(part.numel, k, len(each)) for part, k, each in zip(pieces, budgets, shapes, strict=True)]

    assert agreed(on_ranks(2, MODEL, body)) == [(768, 8, 1)] * 4  # whole rows of 48 or 32, no padding


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("sparsify", ["ahead", "behind"])
def test_density_1_is_dense_to_the_bit(sparsify: str, parts: int) -> None:
    counts = (1,) * 6 if sparsify == "ahead" else (6,)
    plan = Plan(counts, parts=(parts,) * len(counts))

    dense = trained(2, MODEL, 4, merging=plan, compression="none")
    assert trained(2, MODEL, 4, merging=plan, compression="topk", density=1.0, sparsify=sparsify) == dense


@pytest.mark.parametrize("exchange", ["oktopk", "masked", "two-level"])
def test_other_exchanges_take_plans_with_parts(exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(topology.VARIABLE, "2")

    def run(parts: int, density: float) -> list[str]:
        plan = Plan((2, 4), parts=(1, parts))
        return trained(4, MODEL, 4, merging=plan, exchange=exchange, compression="topk", density=density)

    whole, *others = (run(parts, 1.0) for parts in (1, 2, 4))
    assert others == [whole, whole]  # where everything is sent, it plays no part in which message
    sparse = run(4, 0.05)
    assert len(set(sparse)) == 4 and sparse != whole


@pytest.mark.parametrize("exchange", ["oktopk", "masked"])
def test_they_lose_nothing_either(exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Sent(monkeypatch)

    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer = wrap(model, merging=Plan((6,), parts=(3,)), exchange=exchange, compression="topk", density=0.05)
        return conserving(model, optimizer, lambda step: loss_of(model, rank, step), 4, sent)[0]

    assert len(set(agreed(on_ranks(3, MODEL, body)))) == 4


@pytest.mark.parametrize("parts", [2, 5])
def test_an_awkward_model_in_parts(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several dtypes, tensors that some ranks or steps do not use, and one that thaws: a used bit in both messages."""
    sent = Sent(monkeypatch)

    def body(rank: int, model: AwkwardModel, number: int) -> tuple[list[str], set[str]]:
        optimizer = agmerge.DistributedOptimizer(
            torch.optim.SGD(awkward_groups(model), lr=0.05, momentum=0.9),
            model.named_parameters(),
            compression="topk",
            density=0.1 if number > 1 else 1.0,
            exchange="sparse",
            merging=InParts(number=number),
        )

        def loss(step: int) -> torch.Tensor:
            if step == 3:
                model.unfreeze()
            return model.loss(awkward_batch(rank, step), rank, step)

        seen, _ = conserving(model, optimizer, loss, 6, sent) if number > 1 else ([], [])
        for step in range(6, 8):
            optimizer.zero_grad()
            loss(step).backward()
            optimizer.step()
        return seen, {name for name, p in model.named_parameters() if p.grad is not None}

    seen, used = agreed(on_ranks(2, AWKWARD, lambda rank, model: body(rank, model, parts)))
    assert len(set(seen)) == 6
    assert "only_rank_1.weight" in used and "unused.weight" not in used


def test_replanning_between_parts_moves_no_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Sent(monkeypatch)

    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer, seen = wrap(model, merging=Plan((6,)), compression="adtopk", density=0.05), []
        train(model, optimizer, rank, [0])
        for number, parts in enumerate((4, 2, 1, 3)):
            before = {name: kept.clone() for name, kept in residuals(optimizer).items()}
            optimizer._reducer.exchange.agreed.use_plan(replace(optimizer.plan, parts=(parts,)))
            after = residuals(optimizer)
            assert all(same_bits(kept, after[name]) for name, kept in before.items())
            sent.of[rank] = {}
            optimizer.zero_grad()
            loss_of(model, rank, number).backward()
            gradient = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
            for name, kept in residuals(optimizer).items():
                whole = before.get(name, torch.zeros_like(kept)) + gradient[name]
                assert torch.equal(kept + sent.of[rank][name], whole)
            seen.append(digest(model))
        return seen

    assert len(set(agreed(on_ranks(2, MODEL, body)))) == 4


# -- records ----------------------------------------------------------------------------------------------------


def test_a_saved_plan_is_replayed_in_parts(tmp_path: Path) -> None:
    path, options = tmp_path / "plan.json", {"compression": "adtopk", "density": 0.05}

    def body(rank: int, model: nn.Module, plan: Any) -> tuple[list[str], Plan, int]:
        optimizer = wrap(model, merging=plan, **options)
        seen = train(model, optimizer, rank, range(4))
        if rank == 0 and plan != path:
            optimizer.plan.save(path)
        return seen, optimizer.plan, messages()

    first = agreed(on_ranks(2, MODEL, lambda rank, model: body(rank, model, Plan((2, 4), parts=(1, 4)))))
    assert agreed(on_ranks(2, MODEL, lambda rank, model: body(rank, model, path))) == first
    assert first[1].parts == (1, 4) and first[2] == 5
    whole = agreed(on_ranks(2, MODEL, lambda rank, model: body(rank, model, Plan((2, 4)))))
    assert whole[0] != first[0]  # other budgets, other choices


@pytest.mark.parametrize("compression", ["adtopk", "dgc"])
def test_a_checkpoint_goes_on_in_parts(compression: str) -> None:
    def started(model: nn.Module) -> agmerge.DistributedOptimizer:
        return wrap(model, inner(model, compression), merging=InParts(number=4), compression=compression, density=0.05)

    def body(rank: int, model: nn.Module, restart: bool) -> tuple[list[str], tuple[int, ...]]:
        optimizer = started(model)
        seen = train(model, optimizer, rank, range(4))
        if restart:
            state, model = through_a_file(optimizer.state_dict()), copy.deepcopy(model)
            optimizer = started(model)
            optimizer.load_state_dict(state)
        return seen + train(model, optimizer, rank, range(4, 8)), optimizer.plan.parts

    through, again = (agreed(on_ranks(2, MODEL, lambda rank, model, r=r: body(rank, model, r))) for r in (False, True))
    assert through == again and through[1] == (4,)


# -- the pipeline -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [Plan((6,), parts=(3,)), replace(LAYERWISE, parts=(1, 1, 1, 3, 1, 3))])
def test_a_part_leaves_before_the_next_is_selected(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    select, start, recorder = Round._select, Round._start, StepRecorder.__init__

    def selecting(self: Any, operand: Any) -> Any:
        events.append("select")
        return select(self, operand)

    def starting(self: Any, route: Any) -> Any:
        found = start(self, route)
        events.append("sent")
        return found

    def marking(self: Any, *arguments: Any) -> None:
        recorder(self, *arguments)
        note = self.note
        self.note = lambda noted: (events.append("mark") if noted[0] is Event.REACHED else None, note(noted))

    monkeypatch.setattr(Round, "_select", selecting)
    monkeypatch.setattr(Round, "_start", starting)
    monkeypatch.setattr(StepRecorder, "__init__", marking)

    def body(rank: int, model: nn.Module) -> None:
        train(model, wrap(model, merging=plan, compression="topk"), rank, range(2))

    on_ranks(1, MODEL, body)
    pipeline = " ".join(["mark", "select", "sent", "mark", "select", "sent", "select", "sent"])
    assert " ".join(events).count(pipeline) == 2 * sum(parts == 3 for parts in plan.parts)


# -- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan, options",
    [(Plan((6,), labels=("ahead",), parts=(2,)), {}), (Plan((6,), parts=(2,)), {"sparsify": "ahead"})],
)
def test_several_tensors_ahead_are_refused_at_construction(plan: Plan, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="merging: merge buffer 0 has 2 parts, but each of its 6 tensors"):
        on_ranks(1, MODEL, lambda rank, model: wrap(model, merging=plan, **options))


def test_a_planner_that_asks_for_parts_ahead_gets_one_message() -> None:
    """Rank 0 labels its plan; a merge buffer of several tensors ahead has one part then."""

    def body(rank: int, model: nn.Module) -> Plan:
        optimizer = wrap(model, merging=InParts(number=4), sparsify="ahead", compression="topk")
        train(model, optimizer, rank, range(1))
        return optimizer.plan

    assert agreed(on_ranks(2, MODEL, body)).parts == (1,)


# -- by times ---------------------------------------------------------------------------------------------------


def planned(monkeypatch: pytest.MonkeyPatch, planner: Any, **options: Any) -> tuple[Plan, list[str]]:
    """The plan after the first measurements, where selecting takes long; and the columns of its report."""
    monkeypatch.setattr("merging.timeline.SMALLEST", 64)  # the model is small, and so is what it can gain
    monkeypatch.setattr("merging.timeline.GAIN", 0.01)
    found = MeasuredCosts(Curve((0, 3072), (0.0, 50.0)), Curve((0, 700), (0.1, 50.0)), None)

    def probe(*_: object) -> merging.Pieces[MeasuredCosts]:
        yield from ()
        return found

    monkeypatch.setattr(measuring, "measure_costs", probe)
    monkeypatch.setattr(choice, "HOPELESS", 0.0)  # no trials: steps do not take what these costs say

    def body(rank: int, model: nn.Module) -> tuple[Plan, list[str], list[str]]:
        optimizer = wrap(model, merging=planner, **{"compression": "topk", "sparsify": "behind", **options})
        seen = train(model, optimizer, rank, range(FIRST + 3))
        return optimizer.plan, optimizer.merge_report().splitlines()[0].split(), seen

    plan, report, seen = agreed(on_ranks(2, MODEL, body))
    assert len(set(seen)) == FIRST + 3
    return plan, report


@pytest.mark.parametrize("exchange, density", [("sparse", 0.01), ("sparse", "importance"), ("two-level", 0.01)])
def test_agmerge_divides_what_is_exposed(exchange: str, density: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(topology.VARIABLE, "1")
    plan, report = planned(monkeypatch, "agmerge", exchange=exchange, density=density)
    assert plan.parts[-1] > 1 and "parts" in report, plan


@pytest.mark.parametrize(
    "planner, exchange",
    [
        (merging.get("agmerge", parts=1), "sparse"),
        ("agmerge", "oktopk"),
        ("agmerge", "masked"),
        ("exact", "sparse"),
        ("mgwfbp", "sparse"),
    ],
)
def test_nothing_else_does(planner: Any, exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, report = planned(monkeypatch, planner, exchange=exchange)
    assert set(plan.parts) == {1} and "parts" not in report


def test_by_importance_parts_share_the_budget_of_a_tensor() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model, merging=Plan((6,), parts=(5,)), compression="topk", density="importance")
        train(model, optimizer, rank, range(FIRST + 2))
        session = optimizer._reducer.exchange.agreed.buffers
        assert session is not None and session.budgets.are_chosen
        pieces = [part for route in session.messages[0] for part in route.segments if part.tensor_class.sparse]
        slots = [slot for slot in session.layout.slots if slot.tensor_class.sparse]
        whole = sum(session.budgets.of_tensor(slot, 0) for slot in slots)
        budgets = [session.budgets.of_segment(piece, 0) for piece in pieces]
        assert min(budgets) >= 1 and whole <= sum(budgets) <= whole + sum(len(piece.slots) for piece in pieces)
        assert len({session.budgets.of_tensor(slot, 0) for slot in slots}) == 2  # not alike, so shares were in use

    on_ranks(2, MODEL, body)


def test_parts_are_an_option_of_agmerge() -> None:
    assert merging.get("agmerge").options()["parts"] == 8
    with pytest.raises(ValueError, match="agmerge: parts is 0"):
        merging.get("agmerge", parts=0)
