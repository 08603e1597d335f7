# SPDX-License-Identifier: Apache-2.0
"""The life of ``compression="auto"``: what it sends before it has chosen, what it tries, takes and keeps."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support import agreed, on_ranks, train
from support.quantiser_world import (
    MODEL,
    TRIAL,
    World,
    chosen,
    name_of,
    resumed,
    saved,
    trained,
    wrapped,
)
from torch import nn

import merging
from agmerge.exchanges.routing import send_mode
from agmerge.planning import choice
from agmerge.planning.replanner import FIRST
from sparsifiers.quantising.base import Choice

NEAR = 1e6  # seconds to start an exchange, beside which bytes do not count: all candidates are near to each other
END = FIRST + TRIAL


class Muon(torch.optim.SGD):
    """By its name one that mixes elements."""


def mixing(model: nn.Module) -> torch.optim.Optimizer:
    return Muon(model.parameters(), lr=0.1)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    made.install(monkeypatch)
    return made


# -- before it has chosen, and in a trial -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "first"),
    [
        ({}, "eden-4"),
        ({"compression": ["none", "int8"]}, "int8"),
        ({"compression": ["none", "eden-2"]}, "eden-2"),
        ({"compression": ["eden-4", "eden-1", "int8"]}, "eden-4"),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [2, 3])
def test_until_it_has_chosen_it_sends_4_bits_or_the_most_exact_ones(
    size: int, options: dict[str, Any], first: str, world: World
) -> None:
    assert chosen(size, FIRST - 1, **options) == [first] * (FIRST - 1)


def test_until_it_has_chosen_optimizers_that_mix_elements_send_8_bits(world: World) -> None:
    def body(rank: int, model: nn.Module) -> list[str]:
        return trained(rank, model, wrapped(model, mixing(model)), range(END))[0]

    world.start, world.seconds = NEAR, {"none": 2.0}
    assert agreed(on_ranks(2, MODEL, body))[: FIRST - 1] == ["int8"] * (FIRST - 1)
    assert world.tried == [["int8", "none"]]  # and nothing of fewer bits is tried


@pytest.mark.parametrize(
    ("start", "dense", "tried"),
    [
        (NEAR, 1.0, ["eden-4", "eden-2", "none"]),  # of four, not the slower one in the middle
        (NEAR, 1e9, ["int8", "eden-4", "eden-2"]),  # what goes dense is predicted to take longer by far
        (0.0, 0.3, ["eden-2", "none"]),  # twice the bytes are twice as long, and not tried
    ],
)
def test_three_at_most_are_tried_none_that_is_hopeless_dense_last(
    start: float, dense: float, tried: list[str], world: World
) -> None:
    world.start, world.dense = start, dense
    found = chosen(2)
    assert world.tried == [tried]
    assert list(dict.fromkeys(found[FIRST - 1 : -1])) == tried  # each has its turn, in this order


@pytest.mark.parametrize(("size", "tried"), [(2, ["eden-4", "eden-1", "none"]), (3, ["eden-4", "none"])])
def test_a_candidate_of_few_workers_is_not_tried_with_more(size: int, tried: list[str], world: World) -> None:
    world.start, world.seconds = NEAR, {"none": 9.0, "eden-4": 2.0}
    few = Choice(("none", "eden-4", "eden-1"), "eden-4", most_workers={"eden-1": 2})
    assert chosen(size, compression=few)[-1] == tried[-2] and world.tried == [tried]


@pytest.mark.parametrize(
    ("dense", "name", "reason"),
    [
        (1.0, "eden-2", "every other candidate is predicted to take 1.5 times as long"),
        (1e-9, "none", r"uncompressed gradients are predicted to be faster, .* ms"),
    ],
)
def test_where_all_others_are_hopeless_nothing_is_tried(dense: float, name: str, reason: str, world: World) -> None:
    world.dense = dense

    def body(rank: int, model: nn.Module) -> tuple[list[str], str]:
        optimizer = wrapped(model)
        return trained(rank, model, optimizer, range(FIRST + 3))[0], optimizer.stats()["quantiser_why"]

    found, why = agreed(on_ranks(2, MODEL, body))
    assert found == ["eden-4"] * (FIRST - 1) + [name] * 4 and world.tried == []
    assert re.fullmatch(reason, why)


# -- what is taken ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "doubts", "name"),
    [
        ({}, {}, "none"),
        ({"none": 1.04}, {}, "none"),
        ({"none": 1.06}, {}, "eden-4"),
        ({"none": 1.4}, {"none": 0.35}, "none"),
        ({"none": 1.4, "eden-4": 1.06}, {}, "eden-2"),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [2, 3])
def test_the_most_exact_one_that_is_about_as_fast_is_taken_by_all_and_recorded(
    size: int, seconds: dict[str, float], doubts: dict[str, float], name: str, world: World
) -> None:
    world.start, world.seconds, world.doubts = NEAR, seconds, doubts

    def body(rank: int, model: nn.Module) -> tuple[Any, ...]:
        optimizer = wrapped(model)
        names, seen = trained(rank, model, optimizer, range(END))
        stats = optimizer.stats()
        assert len(set(seen)) == END
        return names, seen, optimizer.plan, stats["quantiser"], stats["bits"], stats["quantiser_why"]

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # also that nothing is compressed: it is the wanted answer
        names, _, plan, quantiser, bits, why = agreed(on_ranks(size, MODEL, body))
    assert names[-1] == quantiser == name_of(plan) == name
    assert send_mode(plan).workers == size and bits == {"none": None, "eden-4": 4, "eden-2": 2}[name]
    assert all(f"per step with {each}" in why for each in ("eden-4", "eden-2", "none"))


@pytest.mark.parametrize(
    ("dense", "line"),
    [
        (1.0, r"eden-2 \(2 bits\) from step 11 on: 4\.\dx less traffic than DDP \(every other candidate .*\)"),
        (1e-9, r"uncompressed gradients from step 11 on, as DDP sends them \(uncompressed gradients are .* ms\)"),
    ],
)
def test_one_line_says_what_was_chosen_when_and_how_much_less_is_sent(
    dense: float, line: str, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the first step with it, on rank 0, and no warning; none before, and none where a name leaves no choice."""
    world.dense = dense

    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer, seen = wrapped(model), [""]
        for step in range(FIRST + 3):
            trained(rank, model, optimizer, [step])
            optimizer._reducer.exchange.group.comm.barrier("said").wait(10)
            seen += [capsys.readouterr().err if rank == 0 else ""]
            if step == FIRST:  # ranks agree anew, on the same
                optimizer.set_compressor("auto")
        return seen

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = on_ranks(2, MODEL, body)
    assert not any(second) and not any(first[: FIRST + 1] + first[FIRST + 2 :])
    assert re.fullmatch(f"agmerge: {line}\n", first[FIRST + 1])
    on_ranks(2, MODEL, lambda rank, model: trained(rank, model, wrapped(model, compression="int8"), range(FIRST + 2)))
    assert capsys.readouterr().err == ""


def test_before_it_has_chosen_stats_say_until_when_it_tries(world: World) -> None:
    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer = wrapped(model)
        before = optimizer.stats()["quantiser_why"]
        trained(rank, model, optimizer, range(FIRST - 1))
        return [before, optimizer.stats()["quantiser_why"]]

    before, then = agreed(on_ranks(2, MODEL, body))
    assert "in the first step" in before and then == "candidates are tried until about step 70"
    assert agreed(on_ranks(1, MODEL, body))[1] == "there is one worker, which sends nothing"


def test_a_list_is_auto_among_its_names(world: World) -> None:
    world.start, world.seconds = NEAR, {"none": 1.06, "int8": 1.0}
    assert chosen(2, compression=["none", "int8"])[-1] == "int8" and world.tried == [["int8", "none"]]
    world.seconds = {"none": 1.04}
    assert chosen(2, compression=["8bit", "none"])[-1] == "none"


def test_groups_of_the_script_stay_what_they_are(world: World) -> None:
    def body(rank: int, model: nn.Module) -> tuple[str, tuple[int, ...]]:
        optimizer = wrapped(model, groups=2, merging="agmerge")
        return trained(rank, model, optimizer, range(FIRST))[0][-1], optimizer.plan.counts

    name, counts = agreed(on_ranks(2, MODEL, body))
    assert name == "eden-2" and counts == (3, 3)


def test_a_script_that_measures_by_itself_leaves_the_choice_to_be_made(world: World) -> None:
    def body(rank: int, model: nn.Module) -> str:
        optimizer = wrapped(model)
        train(model, optimizer, rank, range(2))
        optimizer.measure()
        return trained(rank, model, optimizer, range(2, FIRST))[0][-1]

    assert agreed(on_ranks(2, MODEL, body)) == "eden-2"


# -- what is kept -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_keeps_the_choice_for_as_many_workers_however_old_it_is(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    state = saved(2)
    capsys.readouterr()
    state["agmerge"]["steps"] = 3 * choice.AGAIN
    world.start = NEAR  # now all would be tried
    names, states = resumed(2, state, END)
    assert names == ["eden-2"] * END and states[-1] == "settled"
    line = r"agmerge: eden-2 .* from step 3002 on: .* \(it was chosen before, for as many workers\)\n"
    assert re.fullmatch(line, capsys.readouterr().err)  # also where it resumes
    assert all(set(tried) == {"eden-2"} for tried in world.tried)  # of merge buffers alone


def test_with_other_workers_it_begins_there_and_chooses_anew(world: World) -> None:
    state = saved(2)
    world.start = NEAR
    names, states = resumed(3, state, END)
    assert names[: FIRST - 1] == ["eden-2"] * (FIRST - 1) and names[-1] == "none"
    assert world.tried == [["eden-4", "eden-2", "none"]] and states[-1] == "settled"


@pytest.mark.parametrize("compression", ["eden-4", "eden", "int8"])
def test_who_names_a_quantiser_then_gets_it_in_every_step(compression: str, world: World) -> None:
    world.dense = 1e-9
    state = saved(2)

    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer = wrapped(model)
        names = trained(rank, model, optimizer, range(FIRST + 1))[0]
        optimizer.set_compressor(compression)
        return names[-1:] + trained(rank, model, optimizer, range(FIRST + 2))[0]

    name = "eden-2" if compression == "eden" else compression
    assert set(resumed(2, state, FIRST + 2, compression=compression)[0]) == {name}
    assert set(agreed(on_ranks(2, MODEL, body))[1:]) == {name}


def test_a_saved_plan_is_the_choice_for_as_many_workers_and_where_another_begins(world: World, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"

    def body(rank: int, model: nn.Module, plan: Any, steps: int) -> tuple[list[str], merging.Plan, str]:
        optimizer = wrapped(model, merging=plan)
        names = trained(rank, model, optimizer, range(steps))[0]
        model[0].requires_grad_(False)  # ranks agree anew, on other tensors
        model[0].requires_grad_(True)
        names += trained(rank, model, optimizer, [steps])[0]
        return names, optimizer.plan, optimizer.stats()["planning"]

    def run(size: int, plan: Any, steps: int = END) -> tuple[list[str], merging.Plan, str]:
        return agreed(on_ranks(size, MODEL, lambda rank, model: body(rank, model, plan, steps)))

    _, plan, _ = run(2, merging.get("agmerge"), FIRST)
    plan.save(path)
    assert name_of(plan) == "eden-2"
    world.start = NEAR
    names, same, state = run(2, path)
    assert set(names) == {"eden-2"} and same == plan and state == "fixed" and world.tried == []
    names, other, state = run(3, path)
    assert names[0] == "eden-2" and names[-1] == "none" and world.tried == [["eden-4", "eden-2", "none"]]
    assert other.counts == plan.counts and other.names == plan.names and send_mode(other).workers == 3
    assert state == "settled"


# -- when it changes its mind -----------------------------------------------------------------------------------------


@pytest.fixture
def soon(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """A world in which another choice may be made after a hundred steps, and every look finds other times."""
    monkeypatch.setattr(choice, "AGAIN", 100)
    world.start, world.has_changed = NEAR, True
    world.seconds = {"none": 1.5, "eden-4": 1.0, "eden-2": 1.0}
    return world


def choices(world: World) -> list[list[str]]:
    """The trials of several candidates: others are of one's merge buffers."""
    return [tried for tried in world.tried if len(set(tried)) > 1]


def later(world: World, seconds: dict[str, float], steps: int) -> list[str]:
    """In what gradients travel, step by step, where a trial takes other times from step 60 on."""

    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer, names = wrapped(model), []
        for step in range(steps):
            if step == 60:
                optimizer._reducer.exchange.group.comm.barrier("times").wait(10)
                if rank == 0:
                    world.seconds = seconds
            names += trained(rank, model, optimizer, [step])[0]
        return names

    return agreed(on_ranks(2, MODEL, body))


def test_nothing_else_is_tried_before_it_may_be_chosen(soon: World) -> None:
    names = later(soon, {"eden-4": 9.0}, 100)
    assert len(choices(soon)) == 1 and set(names[END:]) == {"eden-4"}


def test_something_more_exact_is_taken_once_it_may_be(soon: World) -> None:
    names = later(soon, {}, 180)
    assert names[90] == "eden-4" and names[-1] == "none" and len(choices(soon)) == 2


def test_something_less_exact_is_taken_after_the_second_trial_that_is_clear(soon: World) -> None:
    names = later(soon, {"none": 2.0, "eden-4": 1.3, "eden-2": 1.0}, 220)
    assert names[90] == "eden-4" and names[-1] == "eden-2" and len(choices(soon)) == 3
    assert all("eden-4" in tried for tried in choices(soon))


def test_what_is_in_use_is_tried_however_slow_it_is_said_to_be(soon: World) -> None:
    """A prediction alone takes nothing less exact."""

    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer, names = wrapped(model), []
        for step in range(180):
            if step == 60:
                optimizer._reducer.exchange.group.comm.barrier("times").wait(10)
                soon.start = 0.0  # eden-2 is predicted to be twice as fast
                soon.seconds = {}
            names += trained(rank, model, optimizer, [step])[0]
        return names

    names = agreed(on_ranks(2, MODEL, body))
    assert ["eden-4", "eden-2"] in soon.tried and names[-1] == "eden-4"
