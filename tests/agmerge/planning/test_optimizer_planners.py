# SPDX-License-Identifier: Apache-2.0
"""Every planner in training, with real times: the plan changes under way, the guarantees do not."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
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
    loss_of,
    mlp,
    on_ranks,
    random_plan,
    residuals,
    same_bits,
    seeded,
    strict_warnings,
    train,
    wrap,
)
from torch import Tensor, nn

import agmerge
import merging
from agmerge import testing
from agmerge.exchanges.message.format import slot_bytes
from agmerge.exchanges.routing import send_mode, with_send_mode
from agmerge.planning import choice, cost_probe, measuring, plan_trial
from agmerge.planning.cost_probe import Budget
from agmerge.planning.replanner import FIRST
from agmerge.step.agreed_state import with_mode
from agmerge.step.merge_buffers import MergeBuffers

MODEL = seeded(mlp)
AWKWARD = seeded(AwkwardModel, 7)
NAMES = [name for name in merging.names() if name != "dear"]
TIMED = [name for name in NAMES if merging.get(name).timed]
Calls = list[tuple[str, str, int]]


class Probes:
    """Counts probes, on any rank."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0

        def probe(session: MergeBuffers, step: int, backward: float, budget: Budget, *_: object) -> Any:
            self.count += 1
            return cost_probe.probe(session, step, backward, budget)

        monkeypatch.setattr(measuring, "measure_costs", probe)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [2, 3])
def test_replicas_calls_and_residuals_hold_across_changes_of_plan(
    size: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, probes = Sent(monkeypatch), Probes(monkeypatch)

    def body(rank: int, model: nn.Module) -> tuple[list[str], list[merging.Plan], Calls]:
        optimizer = wrap(model, merging=name, compression="topk")
        seen, plans = conserving(model, optimizer, lambda step: loss_of(model, rank, step), 30, sent)
        return seen, plans, testing.calls()

    seen, plans, _ = agreed(on_ranks(size, MODEL, body))
    assert len(set(seen)) == 30
    timed = name in TIMED
    assert probes.count >= size if timed else probes.count == 0
    first, last = plans[FIRST - 2], plans[-1]
    threshold = first.counts if timed else last.counts
    assert first.counts == threshold and sorted(first.names or ()) == sorted(last.names or ())
    assert set(plans[: FIRST - 1]) == {first}  # nothing changes before there is something to plan from


def test_a_model_with_everything_that_is_awkward_keeps_its_residuals_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timed, ahead and behind in turn; late layers join after the first plan."""
    sent = Sent(monkeypatch)

    @dataclass(frozen=True, repr=False, kw_only=True)
    class Restless(merging.Planner):
        """Another plan, and the other mode if it may, at every look."""

        name: ClassVar[str] = "restless"
        recheck_every: ClassVar[int] = 3
        min_gain: ClassVar[float] = -1.0
        made: ClassVar[list[str]] = []

        def partition(self, profile: merging.Profile, costs: merging.Costs, mode: str) -> merging.Plan:
            self.made.append(mode)
            return random_plan(len(self.made), len(profile))

    monkeypatch.setattr(measuring.DriftDetector, "look", lambda *_: measuring.Finding.PLAN)
    monkeypatch.setattr(plan_trial.Candidate, "finish", 1.0)  # never better, never worse
    monkeypatch.setattr(choice, "HOPELESS", 0.0)  # no trials

    asked = itertools.count()

    def best(planner: merging.Planner, measured: merging.Measurements) -> tuple[merging.Plan, str]:
        mode = measured.modes[next(asked) % len(measured.modes)]
        return planner.plan(measured.profile, measured.costs, mode), mode

    monkeypatch.setattr(merging, "best", best)

    def body(rank: int, model: AwkwardModel) -> tuple[list[str], list[merging.Plan], Calls]:
        inner = torch.optim.SGD(awkward_groups(model), lr=0.05, momentum=0.9)
        options: dict[str, Any] = {"compression": "topk", "merging": Restless(), "wire": "fp32"}
        optimizer = agmerge.DistributedOptimizer(inner, model.named_parameters(), **options)

        def loss(step: int) -> Tensor:
            if step == 20:
                model.unfreeze()
            return model.loss(awkward_batch(rank, step), rank, step)

        return *conserving(model, optimizer, loss, 40, sent), testing.calls()

    seen, plans, _ = agreed(on_ranks(3, AWKWARD, body))
    assert len(set(seen)) == 40
    assert {plan.labels[0] for plan in plans} == {"", "ahead"} and len(set(plans)) > 5
    assert len(plans[0].names or ()) < len(plans[-1].names or ())


@pytest.mark.parametrize("sparsify", ["auto", "ahead", "behind"])
@pytest.mark.parametrize("name", TIMED)
def test_the_first_plan_is_what_the_saved_measurements_give(name: str, sparsify: str, tmp_path: Path) -> None:
    def body(rank: int, model: nn.Module) -> tuple[merging.Plan, str]:
        optimizer = wrap(model, merging=name, sparsify=sparsify)
        train(model, optimizer, rank, range(FIRST + 1))
        measured = testing.inspect(optimizer).measurements
        assert measured is not None
        if rank == 0:
            measured.save(tmp_path / "measured.json")
        return optimizer.plan, measured.dumps()

    plan, text = agreed(on_ranks(2, MODEL, body))
    measured = merging.Measurements.load(tmp_path / "measured.json")
    assert measured.dumps() == text
    assert measured.modes == (("behind", "ahead") if sparsify == "auto" else (sparsify,))
    assert measured.workers == 2 and dict(measured.facts)["step"] == str(FIRST)
    planned = with_mode(*merging.best(merging.get(name), measured))
    # The measurements are those of the codec that is planned with.
    assert plan == with_send_mode(planned, codec=send_mode(plan).codec)


def test_the_measurements_are_those_of_the_model() -> None:
    def body(rank: int, model: nn.Module) -> merging.Measurements:
        optimizer = wrap(model, merging="agmerge", density=0.1, wire="fp32")
        train(model, optimizer, rank, range(FIRST))
        return optimizer.measurements

    profile = agreed(on_ranks(2, MODEL, body)).profile
    columns = zip(profile.numel.tolist(), profile.work.tolist(), profile.load.tolist(), strict=True)
    found = dict(zip(profile.names, columns, strict=True))
    budgets = {name: -(-p.numel() // 10) for name, p in MODEL.named_parameters() if name in ("0.weight", "2.weight")}
    length = sum(p.numel() for name, p in MODEL.named_parameters() if name in budgets)
    each = slot_bytes(length, sum(budgets.values()), torch.float32, "auto")
    assert 4.5 < each < 5
    for name, p in MODEL.named_parameters():
        # What goes whole has no index: four bytes of those that a selected element takes.
        load = budgets.get(name, math.ceil(4 * p.numel() / each))
        assert found[name] == (p.numel(), p.numel() * (name in budgets), load)
    assert profile.backward.sum() > 0


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_without_a_sparsifier_planners_plan_for_dense(compression: str) -> None:
    def body(rank: int, model: nn.Module) -> tuple[list[str], merging.Measurements | None, merging.Plan]:
        optimizer = wrap(model, merging="exact", compression=compression, dense_sum="ordered")
        seen = train(model, optimizer, rank, range(FIRST + 4))
        assert optimizer._reducer.exchange.agreed.plans is not None
        return seen, testing.inspect(optimizer).measurements, optimizer.plan

    seen, measured, plan = agreed(on_ranks(3, MODEL, body))
    assert measured is not None and measured.modes == ("dense",) and measured.sparsify is None
    assert measured.profile.load.tolist() == measured.profile.numel.tolist()
    assert set(plan.labels) == {""}
    fixed = on_ranks(
        3,
        MODEL,
        lambda r, m: train(
            m, wrap(m, merging="single", compression=compression, dense_sum="ordered"), r, range(FIRST + 4)
        ),
    )
    assert agreed(fixed) == seen  # an ordered sum does not depend on the plan


# -- who is never measured --------------------------------------------------------------------------------------

UNMEASURED: dict[str, tuple[int, dict[str, Any]]] = {
    **{name: (2, {"merging": name}) for name in NAMES if name not in TIMED},
    "groups": (2, {"groups": 2, "merging": "agmerge"}),
    "a plan": (2, {"merging": merging.Plan((2, 4))}),
    "alone": (1, {"merging": "agmerge"}),
}


@pytest.mark.parametrize("case", UNMEASURED)
def test_plans_that_go_by_no_times_are_never_measured_for(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size, options = UNMEASURED[case]
    monkeypatch.setattr("agmerge.options.resolve.MERGING", "agmerge")  # a default stands beside groups
    probes = Probes(monkeypatch)

    def body(rank: int, model: nn.Module) -> tuple[set[str], int]:
        optimizer = wrap(model, **options)
        train(model, optimizer, rank, range(1))
        plan, before = optimizer.plan, len(testing.calls())
        train(model, optimizer, rank, range(1, 2 * FIRST + 6))
        assert optimizer.plan == plan
        assert optimizer._reducer.exchange.agreed.plans is not None and testing.inspect(optimizer).measurements is None
        return {name for _, name, _ in testing.calls()[before:]}, len(plan.counts)

    names, buffers = agreed(on_ranks(size, MODEL, body))
    assert all(name.startswith("buffer ") for name in names) and len(names) >= buffers
    assert probes.count == 0


def test_timed_planners_are_among_those_that_are_tested() -> None:
    assert {"mgwfbp", "omgs", "agmerge", "exact"} <= set(TIMED)
    assert {"layerwise", "single", "count", "threshold"} <= set(UNMEASURED)


# -- one that nobody here has written ---------------------------------------------------------------------------


@dataclass(frozen=True, repr=False, kw_only=True)
class Halves(merging.Planner):
    """Two merge buffers."""

    name: ClassVar[str] = "halves"

    def partition(self, profile: merging.Profile, costs: merging.Costs, mode: str) -> merging.Plan:
        half = len(profile) // 2
        return merging.Plan((half, len(profile) - half))


@dataclass(frozen=True, repr=False, kw_only=True)
class Broken(merging.Planner):
    """Raises ``error`` when it is asked."""

    name: ClassVar[str] = "broken"
    error: Exception
    timed: ClassVar[bool] = True

    def partition(self, profile: merging.Profile, costs: merging.Costs, mode: str) -> merging.Plan:
        raise self.error


@dataclass(frozen=True, repr=False, kw_only=True)
class Short(merging.Planner):
    """Leaves out a tensor."""

    name: ClassVar[str] = "short"

    def plan(self, profile: merging.Profile, costs: merging.Costs, mode: str = "dense") -> merging.Plan:
        return merging.Plan((len(profile) - 1,), names=profile.names[1:])

    def partition(self, profile: merging.Profile, costs: merging.Costs, mode: str) -> merging.Plan:
        raise NotImplementedError


def test_a_planner_of_the_scripts_own_is_given_as_an_object() -> None:
    def body(rank: int, model: nn.Module) -> tuple[list[str], list[merging.Plan]]:
        optimizer, seen, plans = wrap(model, merging=Halves(), wire="fp32"), [], []
        for step in range(FIRST + 3):
            seen += train(model, optimizer, rank, [step])
            plans.append(optimizer.plan)
            typical = optimizer._reducer.exchange.agreed.times.typical()  # of this plan, or not known yet
            assert typical is None if step == FIRST - 1 else typical and len(typical.handed) == len(plans[-1].counts)
        return seen, plans

    seen, plans = agreed(on_ranks(2, MODEL, body))
    assert [plan.counts for plan in plans[FIRST - 1 :]] == [(3, 3)] * 4 and plans[0].counts == (6,)
    assert len(set(seen)) == FIRST + 3


@pytest.mark.parametrize(
    "planner",
    [Broken(error=ValueError("no way")), Broken(error=TypeError("no way")), Broken(error=KeyError("no way")), Short()],
    ids=["ValueError", "TypeError", "KeyError", "short"],
)
@pytest.mark.parametrize("size", [2, 3])
def test_a_planner_that_fails_is_the_same_error_on_every_rank(size: int, planner: merging.Planner) -> None:
    def body(rank: int, model: nn.Module) -> str:
        optimizer = wrap(model, merging=planner, timeout=20.0)
        train(model, optimizer, rank, range(FIRST - 1))
        with pytest.raises(ValueError) as raised:
            train(model, optimizer, rank, [FIRST - 1])
        assert type(raised.value) is ValueError
        with pytest.raises(agmerge.AGMergeError, match="AGM124"):
            train(model, optimizer, rank, [FIRST])
        return str(raised.value)

    text = agreed(on_ranks(size, MODEL, body))
    assert planner.name in text and ("no way" in text or "tensors" in text)


# -- what a planner's plan goes through -------------------------------------------------------------------------


def test_a_checkpoint_goes_on_with_the_plan_that_was_adopted() -> None:
    def body(rank: int, model: nn.Module) -> tuple[merging.Plan, merging.Plan]:
        optimizer = wrap(model, merging=Halves(), compression="topk", wire="fp32")
        train(model, optimizer, rank, range(FIRST + 2))
        adopted, state = optimizer.plan, optimizer.state_dict()
        optimizer.close()
        again = wrap(model, merging=Halves(), compression="topk", wire="fp32")
        again.load_state_dict(state)
        assert all(same_bits(kept, state["agmerge"]["residuals"][name]) for name, kept in residuals(again).items())
        train(model, again, rank, [FIRST + 2])
        assert again.plan == adopted and again._reducer.exchange.agreed.plans is not None
        assert testing.inspect(again).measurements is None
        train(model, again, rank, range(FIRST + 3, 2 * FIRST + 2))  # it is measured for anew
        assert testing.inspect(again).measurements is not None
        return adopted, again.plan

    with strict_warnings():
        adopted, plan = agreed(on_ranks(2, MODEL, body))
    assert adopted.counts == (3, 3) and plan.counts == (3, 3)


@pytest.mark.parametrize("change", ["compressor", "membership"])
def test_another_compressor_or_membership_is_measured_for_anew(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probes = Probes(monkeypatch)

    def body(rank: int, model: nn.Sequential) -> list[tuple[int, int]]:
        optimizer, seen = wrap(model, merging=Halves(), compression="topk", wire="fp32"), []
        for step in range(3 * FIRST):
            if step == FIRST + 2 and change == "compressor":
                optimizer.set_compressor("topk", density=0.2)
            if step == FIRST + 2 and change == "membership":
                model[0].requires_grad_(False)
                model[0].zero_grad()
            train(model, optimizer, rank, [step])
            agmerge.barrier()
            seen.append((len(optimizer.plan.counts), probes.count // 2))
            agmerge.barrier()
        density = 0.2 if change == "compressor" else 0.01
        assert f"density={density}" in dict(optimizer.measurements.facts)["compressor"]
        return seen

    seen = agreed(on_ranks(2, MODEL, body))
    probed = [count for _, count in seen]
    first = [0] * (FIRST - 1) + [1] * (FIRST + 2)  # up to the step before the tenth with what is new
    assert probed == first + [2] * (3 * FIRST - len(first))
    assert seen[FIRST][0] == seen[-1][0] == 2
