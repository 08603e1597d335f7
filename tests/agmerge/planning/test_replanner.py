# SPDX-License-Identifier: Apache-2.0
"""What changes a plan, and when: with times and costs that follow a script, and as many steps as it takes."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import agreed, mlp, on_ranks, seeded, train, wrap
from torch import nn

import merging
from agmerge import testing
from agmerge.metrics.running_times import RunningStepTimes
from agmerge.metrics.step_times import Seconds
from agmerge.planning import choice, cost_probe, measuring, plan_trial, replanner
from agmerge.planning.cost_probe import Budget, MeasuredCosts
from agmerge.planning.measuring import CONFIRMATIONS, LATE, STEADY, DriftDetector
from agmerge.planning.replanner import FIRST
from agmerge.runtime import workers
from agmerge.step.merge_buffers import MergeBuffers
from merging import Curve, Pieces

MODEL = seeded(mlp)
EVERY = 2  # steps from look to look
START, LOAD = 1.0, 240  # seconds to start an exchange, and elements of all tensors together, which take four more
SHORT, LONG = 0.5, 20.0  # of backward: one merge buffer is best; MANY are
MANY = 3

Number = Callable[[int], float]


def constant(value: float) -> Number:
    return lambda look: value


def change(before: float, after: float, at: int, until: int = 10**9) -> Number:
    """``after`` from look ``at`` on, ``before`` it ``before``; look 0 is the one that makes the first plan."""
    return lambda look: after if at <= look < until else before


@dataclass
class World:
    """What is measured in place of times. ``backward`` and ``travel``: seconds, by look; ``start``: by probe.

    ``told``: what each rank's own figures are multiplied by. ``probes``, ``plans``: the steps at which rank 0 did so.
    """

    backward: Number = constant(SHORT)
    travel: Number = constant(START)
    start: Number = constant(START)
    told: Callable[[int], float] = lambda rank: 1.0
    probes: list[int] = field(default_factory=list)
    plans: list[int] = field(default_factory=list)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        world = self

        class Scripted(RunningStepTimes):
            look = -1

            def ready(self) -> Seconds:
                self.settle()
                self.look += 1
                whole = world.backward(self.look) * world.told(workers.world().rank)
                return np.linspace(0.0, whole, len(self.steps[-1].ready))

            def travel(self) -> Seconds:
                seconds = world.travel(self.look) * world.told(workers.world().rank)
                return np.full(len(self.steps[-1].handed), seconds)

        def probe(
            session: MergeBuffers, step: int, backward: float, budget: Budget, *_: object
        ) -> Pieces[MeasuredCosts]:
            start = world.start(len(world.probes)) * 1.0
            session.comm.barrier("probe").wait(10)  # every rank reads the number before rank 0 counts
            if session.comm.rank == 0:
                world.probes.append(step)
            selecting = None if not session.config.compression.compressor.selects else Curve((0,), (0.0,))
            yield from ()
            return MeasuredCosts(selecting, Curve((0, LOAD), (start, 5 * start)), None)

        original = merging.best

        def best(planner: merging.Planner, measured: merging.Measurements) -> tuple[merging.Plan, str]:
            world.plans.append(int(dict(measured.facts)["step"]))
            return original(planner, measured)

        monkeypatch.setattr("agmerge.step.agreed_state.RunningStepTimes", Scripted)
        monkeypatch.setattr(measuring, "measure_costs", probe)
        monkeypatch.setattr(merging, "best", best)
        monkeypatch.setattr("agmerge.step.config.CHOICE", ())  # see test_wire_auto.py
        monkeypatch.setattr(choice, "HOPELESS", 0.0)  # no trials: see test_plan_trial.py


def at(look: int) -> int:
    """The step after which the look happens; 0 is the first plan."""
    return FIRST + EVERY * look


def plans_of(world: World, looks: int, monkeypatch: pytest.MonkeyPatch, size: int = 2, **options: Any) -> list[int]:
    """Merge buffers in use after each look, the first plan included; ranks agree on plans and calls."""
    world.install(monkeypatch)
    planner = options.pop("planner", None) or merging.get("agmerge", check_every=EVERY)

    def body(rank: int, model: nn.Module) -> tuple[list[merging.Plan], list[Any], list[str]]:
        optimizer, plans, seen = wrap(model, merging=planner, **options), [], []
        for step in range(at(looks)):
            seen += train(model, optimizer, rank, [step])
            plans.append(optimizer.plan)
        return plans, testing.calls(), seen

    plans, _, seen = agreed(on_ranks(size, MODEL, body))
    assert len(set(seen)) == at(looks)
    changes = [step for step in range(1, at(looks)) if plans[step] != plans[step - 1]]
    assert all((step + 1 - FIRST) % EVERY == 0 for step in changes)  # at a look, and never between
    return [len(plans[at(look) - 1].counts) for look in range(looks + 1)]


# -- what stays as it is ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("backward, buffers", [(SHORT, 1), (LONG, MANY)])
def test_while_nothing_changes_one_probe_and_one_plan_is_all(
    backward: float, buffers: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(backward=constant(backward))
    assert plans_of(world, 5, monkeypatch, size) == [buffers] * 6
    assert world.probes == world.plans == [FIRST]


@pytest.mark.parametrize("check_every", [0, None])
def test_a_planner_that_does_not_look_again_keeps_its_first_plan(
    check_every: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = merging.get("exact") if check_every is None else merging.get("agmerge", check_every=check_every)
    world = World(backward=change(LONG, SHORT, at=1), travel=change(START, 9.0, at=1))
    assert plans_of(world, 5, monkeypatch, planner=planner) == [MANY] * 6
    assert world.probes == world.plans == [FIRST]


def test_what_an_exchange_takes_beside_the_prediction_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe says what merging saves, not what backward does to an exchange: the first look is the measure."""
    world = World(travel=constant(START * 7))
    assert plans_of(world, 5, monkeypatch) == [1] * 6 and world.probes == [FIRST]


@pytest.mark.parametrize("factor", [STEADY[0] * 1.01, STEADY[1] * 0.99])
def test_a_small_change_of_the_exchange_is_none(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(travel=change(START, START * factor, at=2))
    plans_of(world, 5, monkeypatch)
    assert world.probes == world.plans == [FIRST]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("part, planned", [(0.98, [FIRST]), (1.02, [FIRST, FIRST + 2 * EVERY])])
def test_a_small_change_of_backward_is_none(
    part: float, planned: list[int], sign: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = LONG + START * 1.267  # the last tensor's exchange
    world = World(backward=change(LONG, LONG + part * sign * LATE * finish, at=1))
    plans_of(world, 4, monkeypatch)
    assert world.plans == planned and world.probes == [FIRST]


@pytest.mark.parametrize("what", ["travel", "backward"])
def test_what_only_one_look_sees_is_a_blip(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steady = {"travel": START, "backward": SHORT}[what]
    world = World()
    setattr(world, what, change(steady, steady * 100, at=2, until=3))
    assert plans_of(world, 6, monkeypatch) == [1] * 7
    assert world.probes == world.plans == [FIRST]


# -- what changes a plan, and when ------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [STEADY[0] * 0.95, STEADY[1] * 1.05, 100.0])
@pytest.mark.parametrize("since", [2, 4])
def test_another_exchange_is_probed_and_planned_for_at_the_second_look_that_sees_it(
    since: int, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(
        backward=constant(LONG),
        travel=change(START, START * factor, at=since),
        start=change(START, 100 * START, at=1),  # so that the new plan is another one
    )
    seen = since + CONFIRMATIONS - 1
    found = plans_of(world, seen + 2, monkeypatch)
    assert found == [MANY] * seen + [1] * 3
    assert world.probes == world.plans == [FIRST, at(seen)]


def test_another_backward_is_planned_for_at_the_second_look_and_costs_no_probe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(backward=change(LONG, SHORT, at=3))
    assert plans_of(world, 6, monkeypatch) == [MANY] * 4 + [1] * 3
    assert world.plans == [FIRST, at(4)] and world.probes == [FIRST]


def test_two_looks_that_see_different_things_measure_everything_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward first, the exchange next."""
    world = World(backward=change(LONG, LONG / 2, at=2), travel=change(START, 3.0, at=3))
    plans_of(world, 4, monkeypatch)
    assert world.probes == world.plans == [FIRST, at(3)]


def test_after_a_new_plan_two_looks_are_needed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(backward=lambda look: [SHORT, LONG, LONG, SHORT, SHORT, LONG, SHORT, LONG][look])
    assert plans_of(world, 7, monkeypatch) == [1, 1, MANY, MANY, 1, 1, 1, 1]
    assert world.plans == [FIRST, at(2), at(4)]


def test_after_a_plan_the_exchange_is_compared_with_what_it_takes_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays at three times what it was: probed once, and not again and again."""
    world = World(travel=change(START, 3 * START, at=2), start=change(START, 3 * START, at=1))
    plans_of(world, 8, monkeypatch)
    assert world.probes == [FIRST, at(3)]


def test_another_density_is_planned_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up ends between the first and the second look."""
    world = World()
    plans_of(world, 4, monkeypatch, compression="topk", warmup=at(1) + 1)
    assert world.plans == [FIRST, at(1), at(2)] and world.probes == [FIRST]


# -- what a new plan must be worth ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gain, backward, buffers",
    [(0.0, SHORT, 1), (0.2, SHORT, 1), (0.3, SHORT, MANY), (0.1, 4.0, 2), (0.5, 4.0, MANY)],
)
def test_a_new_plan_is_taken_for_what_it_gains(
    gain: float, backward: float, buffers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan in use would take about a quarter longer than the best one."""
    world = World(backward=change(LONG, backward, at=1))
    planner = merging.get("agmerge", check_every=EVERY, gain=gain)
    assert plans_of(world, 4, monkeypatch, planner=planner) == [MANY] * 2 + [buffers] * 3
    assert world.plans == [FIRST, at(2)]


def test_a_plan_that_is_kept_is_compared_with_what_was_measured_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not worth a new plan, it is not asked for at every other look."""
    planner = merging.get("agmerge", check_every=EVERY, gain=0.9)
    world = World(backward=change(LONG, LONG / 2, at=1))

    def body(rank: int, model: nn.Module) -> tuple[float, str]:
        optimizer = wrap(model, merging=planner)
        train(model, optimizer, rank, range(at(8)))
        measured = optimizer.measurements
        return float(measured.profile.backward.sum()), dict(measured.facts)["step"]

    world.install(monkeypatch)
    assert agreed(on_ranks(2, MODEL, body)) == (LONG, str(FIRST))  # of the plan in use
    assert world.plans == [FIRST, at(2)]


# -- ranks that measure different times -------------------------------------------------------------------------


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_the_slowest_rank_says_when_tensors_are_ready(slow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(backward=constant(SHORT), told=lambda rank: LONG / SHORT if rank == slow else 1.0)
    assert plans_of(world, 3, monkeypatch, size=3) == [MANY] * 4
    assert world.plans == [FIRST]


@pytest.mark.whole
@pytest.mark.parametrize("late", [0, 1])
def test_the_rank_that_waited_least_says_what_an_exchange_takes(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for the slowest rank, and that is no change of the exchange."""

    world = World()
    world.install(monkeypatch)

    def travel(self: Any) -> Seconds:
        waits = START * (1 if workers.world().rank == late or self.look < 2 else 50)
        return np.full(len(self.steps[-1].handed), waits)

    monkeypatch.setattr("agmerge.step.agreed_state.RunningStepTimes.travel", travel)

    def body(rank: int, model: nn.Module) -> merging.Plan:
        optimizer = wrap(model, merging=merging.get("agmerge", check_every=EVERY))
        train(model, optimizer, rank, range(at(5)))
        return optimizer.plan

    agreed(on_ranks(2, MODEL, body))
    assert world.probes == world.plans == [FIRST]


@pytest.mark.parametrize("seconds, buffers", [([1.0, 2.0], MANY), ([2.0, 1.0], 1)])
def test_the_plan_in_use_is_tried_beside_a_new_one(
    seconds: list[float], buffers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs may be wrong: where steps with the new plan take longer, it does not stay."""
    World(backward=constant(LONG)).install(monkeypatch)
    monkeypatch.setattr(choice, "HOPELESS", 2.0)
    monkeypatch.setattr(plan_trial.PlanTrial, "seconds", lambda trial: seconds)

    def body(rank: int, model: nn.Module) -> list[int]:
        optimizer = wrap(model, merging=merging.get("agmerge", check_every=100))
        found = []
        for step in range(FIRST + 2 * plan_trial.TURN * plan_trial.ROUNDS + 1):
            train(model, optimizer, rank, [step])
            found.append(len(optimizer.plan.counts))
        return found

    found = agreed(on_ranks(2, MODEL, body))
    turns = [MANY] * plan_trial.TURN + [1] * plan_trial.TURN
    assert found == [1] * (FIRST - 1) + turns * plan_trial.ROUNDS + [buffers] * 2


@pytest.mark.whole
@pytest.mark.parametrize(
    "seconds, buffers",
    [(([1.0, 2.0], [3.0, 2.5]), 1), (([2.0, 1.0], [2.5, 3.0]), MANY)],
    ids=["the new one is slower on rank 0 alone", "the old one is"],
)
def test_the_slowest_rank_decides_a_trial(
    seconds: tuple[list[float], list[float]], buffers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    World(backward=constant(LONG)).install(monkeypatch)
    monkeypatch.setattr(choice, "HOPELESS", 2.0)
    monkeypatch.setattr(plan_trial.PlanTrial, "seconds", lambda trial: seconds[workers.world().rank])

    def body(rank: int, model: nn.Module) -> int:
        optimizer = wrap(model, merging=merging.get("agmerge", check_every=100))
        train(model, optimizer, rank, range(FIRST + 2 * plan_trial.TURN * plan_trial.ROUNDS + 1))
        return len(optimizer.plan.counts)

    assert agreed(on_ranks(2, MODEL, body)) == buffers


def test_steps_of_a_trial_do_not_count_until_times_are_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    World(backward=constant(LONG)).install(monkeypatch)
    monkeypatch.setattr(choice, "HOPELESS", 2.0)
    monkeypatch.setattr(plan_trial.PlanTrial, "seconds", lambda trial: [1.0, 2.0])
    every, checked = FIRST + 3, []
    look = DriftDetector.look

    def noted(self: Any, *arguments: Any, **options: Any) -> Any:
        checked.append(step_of_rank_0[-1])
        return look(self, *arguments, **options)

    step_of_rank_0: list[int] = []
    monkeypatch.setattr(DriftDetector, "look", noted)
    trial = 2 * plan_trial.TURN * plan_trial.ROUNDS

    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model, merging=merging.get("agmerge", check_every=every))
        for step in range(FIRST + trial + 2 * every):
            if rank == 0:
                step_of_rank_0.append(step + 1)
            train(model, optimizer, rank, [step])

    on_ranks(2, MODEL, body)
    assert checked == [trial + every, trial + 2 * every]


def test_rank_0_plans_over_several_steps_and_comes_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan some forty pieces after each step where there is little time, of several plans."""

    def costs(*_: object) -> Pieces[MeasuredCosts]:
        yield from ()
        return MeasuredCosts(Curve((0, 1), (0.0, 0.0)), *[Curve((0, LOAD), (1e-3, slope)) for slope in (2.0, 1.0)])

    monkeypatch.setattr(measuring, "measure_costs", costs)
    monkeypatch.setattr(plan_trial.PlanTrial, "seconds", lambda trial: [1.0 + n for n in range(len(trial.plans))])

    def body(rank: int, model: nn.Module) -> tuple[list[str], merging.Plan]:
        optimizer = wrap(model, compression="topk", density=0.1, wire="fp32", merging="agmerge")
        states = []
        for step in range(FIRST + 30):
            train(model, optimizer, rank, [step])
            states.append(optimizer.stats()["planning"])
        return states, optimizer.plan

    at_once, plan = agreed(on_ranks(2, MODEL, body))
    monkeypatch.setattr(cost_probe, "SHARE", 0.0)
    ticks = itertools.count()  # pieces take 25 microseconds each, on rank 0
    clock = SimpleNamespace(perf_counter=lambda: cost_probe.LEAST / 40 * next(ticks))
    monkeypatch.setattr(merging.pieces, "time", clock)
    spread, same = agreed(on_ranks(2, MODEL, body))
    assert same == plan and "probing" not in at_once and 2 <= spread.count("probing") <= 20


def test_rank_0_decides_and_the_others_need_not_be_able_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning, looking back, comparing: all of it happens on one rank, and what it finds is what all do."""
    for owner, what in ((DriftDetector, "look"), (replanner, "go_on")):
        original = getattr(owner, what)

        def only(self: Any, *arguments: Any, original: Any = original, **options: Any) -> Any:
            assert workers.world().rank == 0
            return original(self, *arguments, **options)

        monkeypatch.setattr(owner, what, only)
    world = World(backward=change(LONG, SHORT, at=1))
    assert plans_of(world, 3, monkeypatch, size=3) == [MANY, MANY, 1, 1]


def test_nothing_is_said_between_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    World().install(monkeypatch)

    def body(rank: int, model: nn.Module) -> list[int]:
        optimizer, spoken = wrap(model, merging=merging.get("agmerge", check_every=EVERY)), []
        for step in range(at(3)):
            before = len(testing.calls())
            train(model, optimizer, rank, [step])
            names = [name for _, name, _ in testing.calls()[before:]]
            if step and not all(name.startswith("buffer ") for name in names):
                spoken.append(step + 1)
        return spoken

    assert agreed(on_ranks(2, MODEL, body)) == [at(look) for look in range(4)]


@pytest.mark.parametrize("steps", [1, FIRST + 2], ids=["before it plans", "after"])
def test_the_memory_of_an_earlier_agreement_is_freed_without_a_collection(steps: int) -> None:
    def body(rank: int, model: nn.Module) -> bool:
        optimizer = wrap(model, compression="topk", density=0.1, merging="agmerge")
        train(model, optimizer, rank, range(steps))
        before = weakref.ref(optimizer._reducer.exchange.agreed.buffers)
        optimizer.set_compressor("topk")
        train(model, optimizer, rank, [steps])
        return before() is None

    gc.disable()
    try:
        assert agreed(on_ranks(2, MODEL, body))
    finally:
        gc.enable()
