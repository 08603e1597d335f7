# SPDX-License-Identifier: Apache-2.0
"""A run that ends before ``compression="auto"`` has chosen, and one that goes on from its checkpoint."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
from support import on_ranks, through_a_file
from support.quantiser_world import MODEL, TRIAL, World, resumed, saved, wrapped
from torch import nn

from agmerge.planning import cost_probe, measuring
from agmerge.planning.replanner import FIRST
from merging import Pieces

NEAR = 1e6  # seconds to start an exchange, beside which bytes do not count: all candidates are near to each other
END = FIRST + TRIAL


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    made.install(monkeypatch)
    return made


@pytest.mark.parametrize("after", [3, 7])
def test_a_run_that_ends_in_a_trial_is_gone_on_with_there(after: int, world: World) -> None:
    """Nothing is measured again, and candidates that have had their turn have no other one."""
    world.start, world.seconds = NEAR, {"none": 9.0, "eden-4": 9.0}
    state = saved(2, FIRST + after)  # after 7 of these "none" has its turn
    names, states = resumed(2, state, TRIAL)
    tried = ["eden-4", "eden-2", "none"]
    assert world.tried == [tried, tried]  # the second time it goes on
    left = tried[after // 3 :]
    assert list(dict.fromkeys(names)) == [*left, "eden-2"][: len(left) + ("eden-2" not in left)]
    assert names[3 * len(left) :] == ["eden-2"] * (TRIAL - 3 * len(left))
    assert states[0] == "trying" and states[3 * len(left) :] == ["settled"] * (TRIAL - 3 * len(left))


def test_a_trial_is_kept_from_run_to_run_before_the_first_step_too(world: World) -> None:
    world.start = NEAR

    def body(rank: int, model: nn.Module) -> Any:
        optimizer = wrapped(model)
        optimizer.load_state_dict(copy.deepcopy(state))
        return through_a_file(optimizer.state_dict())

    state = saved(2, FIRST + 7)
    assert state["agmerge"]["trial"]
    again = on_ranks(2, MODEL, body)[0]
    assert again["agmerge"]["trial"] == state["agmerge"]["trial"]
    assert saved(2, END)["agmerge"]["trial"] == ""


def another_size(state: Any) -> int:
    return 3


def damaged(state: Any) -> int:
    state["agmerge"]["trial"] = state["agmerge"]["trial"].replace("turns", "turn5")
    return 2


def none_kept(state: Any) -> int:
    del state["agmerge"]["trial"]  # of a version that kept none
    return 2


@pytest.mark.parametrize("change", [another_size, damaged, none_kept])
def test_a_trial_of_other_workers_or_a_damaged_one_goes_by_nothing_that_was_tried(change: Any, world: World) -> None:
    world.start = NEAR
    state = saved(2, FIRST + 7)
    names, states = resumed(change(state), state, END)
    assert names[: FIRST - 1] == ["eden-4"] * (FIRST - 1) and states[: FIRST - 1] == ["timing"] * (FIRST - 1)
    assert names[-1] == "none" and states[-1] == "settled"


def test_a_run_that_ends_while_costs_are_measured_is_followed_by_one_that_measures_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a training of many short runs would never come to a trial. Once: later measurements are spread again."""
    at_once: list[bool] = []

    def slow(buffers: Any, step: int, backward: float, budget: Any, *more: Any) -> Pieces[cost_probe.MeasuredCosts]:
        at_once.append(budget.share == math.inf)
        for _ in range(0 if at_once[-1] else TRIAL):
            yield
        return (yield from probe(buffers, step, backward, budget, *more))

    probe = measuring.measure_costs
    monkeypatch.setattr(measuring, "measure_costs", slow)
    monkeypatch.setattr(cost_probe, "share_of", lambda step: 1.0)  # not all after one step, however long these are
    world.start = NEAR
    state = saved(2, FIRST + 3)
    assert at_once == [False] * 2 and world.tried == []
    again = saved(2, FIRST - 1, state)  # nothing came of that one
    names, states = resumed(2, again, END)
    assert at_once == [False] * 2 + [True] * 2 and world.tried == [["eden-4", "eden-2", "none"]]
    assert names[-1] == "none" and states[-1] == "settled"
