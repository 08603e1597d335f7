# SPDX-License-Identifier: Apache-2.0
"""Plans take turns, what other load adds to some steps decides nothing, and what is out has no further turn."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

import merging
from agmerge.planning import plan_trial
from agmerge.planning.plan_trial import ROUNDS, TURN, PlanTrial

doubts = PlanTrial.doubts  # in place of which all tests have none
PLANS = tuple(merging.Plan((1,) * number) for number in (1, 2, 3))
Seconds = Callable[[int, int], float]  # of a plan, by its number, in a step of the trial


def trained(monkeypatch: pytest.MonkeyPatch, seconds: Seconds, plans: int) -> tuple[list[int], list[float]]:
    """Train until the trial is over: the plan of each turn, and what a step takes with each."""
    monkeypatch.setattr(plan_trial, "HOPELESS", 1.4)
    monkeypatch.setattr(plan_trial, "SURE", 2)
    clock, step = [0.0], 0
    monkeypatch.setattr(plan_trial, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    trial, turns = PlanTrial(*PLANS[:plans]), [0]
    while True:
        for number in range(TURN):
            clock[0] += seconds(turns[-1], step) + (100.0 if number == 0 else 0.0)  # there it is made: not counted
            step += 1
            assert trial.count_step() is (number == TURN - 1)
        following = trial.following()
        if following < 0:
            return turns, trial.seconds()
        assert trial.begin_turn(following) is PLANS[following]
        turns.append(following)


def test_plans_take_turns_while_they_are_much_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, seconds = trained(monkeypatch, lambda plan, step: 1.0 + 0.1 * plan + step % 2, 2)
    assert turns == [0, 1] * ROUNDS and seconds == pytest.approx([1.0, 1.1])


def test_a_hopeless_plan_has_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    for first in (0, 1):  # whichever has the first one
        turns, _ = trained(monkeypatch, lambda plan, step, first=first: 1.5 if plan == first else 1.0, 2)  # type: ignore[misc]
        assert turns == [0, 1]
    turns, _ = trained(monkeypatch, lambda plan, step: (1.0, 1.5, 1.05)[plan], 3)
    assert turns == [0, 1, 2, 0, 2]


def test_a_plan_that_was_slower_in_every_step_has_two_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, seconds = trained(monkeypatch, lambda plan, step: 1.0 + 0.05 * plan, 2)
    assert turns == [0, 1, 0, 1] and seconds == pytest.approx([1.0, 1.05])


@pytest.mark.parametrize("begins", range(2 * TURN * ROUNDS))
def test_other_load_for_a_while_does_not_decide(begins: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of all steps take longer, wherever that begins: one plan after the other, the better one would lose."""
    half = TURN * ROUNDS
    loaded = {(begins + more) % (2 * half) for more in range(half)}
    _, seconds = trained(monkeypatch, lambda plan, step: (1.0 + 0.04 * plan) * (1.3 if step in loaded else 1.0), 2)
    assert seconds[0] < seconds[1]


def test_the_doubt_is_by_how_much_other_steps_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(plan_trial, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    trial = PlanTrial(*PLANS[:1])
    for seconds in [9.0, 1.0, 2.0] * ROUNDS:
        clock[0] += seconds
        if trial.count_step():
            trial.begin_turn(0)
    assert trial.seconds() == [1.0] and doubts(trial) == [0.5]
