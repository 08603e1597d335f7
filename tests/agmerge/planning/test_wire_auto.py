# SPDX-License-Identifier: Apache-2.0
"""wire="auto": few bits where the link asks for it, and nothing else changes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import Sent, agreed, conserving, loss_of, mlp, on_ranks, seeded, train, wrap
from torch import nn

import merging
from agmerge import testing
from agmerge.backends import topology
from agmerge.exchanges.routing import SendMode, send_mode, with_send_mode
from agmerge.planning import cost_probe, measuring, plan_trial, replanner
from agmerge.planning.cost_probe import Budget
from agmerge.planning.replanner import FIRST
from agmerge.step.merge_buffers import MergeBuffers
from merging import Curve, Pieces

MODEL = seeded(mlp)
SLOW, FAST = 1.0, 0.0  # seconds an element: few bits are faster by far, or all formats alike
TRIAL = 3 * plan_trial.TURN * plan_trial.ROUNDS


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What an element takes in an exchange, and one that goes dense, in place of what is measured; to be changed."""
    seconds = [SLOW]

    def probe(
        buffers: MergeBuffers, step: int, backward: float, budget: Budget, *_: object
    ) -> Pieces[cost_probe.MeasuredCosts]:
        # A start-up of a second: one message is best, however long load makes a backward pass.
        line, *dense = (Curve((0, 10**6), (1.0, 1.0 + slope * 10**6)) for slope in seconds)
        yield from ()
        return cost_probe.MeasuredCosts(Curve((0, 1), (0.0, 0.0)), line, *dense or [None])

    monkeypatch.setattr(measuring, "measure_costs", probe)
    return seconds


@pytest.fixture(autouse=True)
def trial(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds of a step in each format, in place of what is measured; to be changed."""
    seconds = {"auto": 3.0, "fp16": 2.0, "int8": 1.0}

    def measured(trial: plan_trial.PlanTrial) -> list[float]:
        return [seconds[send_mode(plan).codec] for plan in trial.plans]

    monkeypatch.setattr(plan_trial.PlanTrial, "seconds", measured)
    return seconds


def wires(size: int, steps: int, **options: Any) -> list[str]:
    """Train; the wire after each step, the same on all ranks, as are their calls and replicas."""

    def body(rank: int, model: nn.Module) -> tuple[list[str], Any, list[str]]:
        optimizer = wrap(model, **{"compression": "topk", "density": 0.1, "merging": "agmerge", **options})
        found, seen = [], []
        carries = "sync" in options  # then parameters differ between ranks
        for step in range(steps):
            digests = train(model, optimizer, rank, [step])
            seen += [str(step)] if carries else digests
            found.append(optimizer.stats()["values"])
        calls = [call[:2] for call in testing.calls()]  # oktopk's have as many bytes as it takes
        # With two levels calls are in the same order on each of the two communicators: a rank goes over to the other
        # one when a sum of its node has arrived.
        return found, sorted(calls, key=lambda call: call[1].endswith("/node")), seen

    found, _, seen = agreed(on_ranks(size, MODEL, body))
    assert len(set(seen)) == steps
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_a_slow_link_takes_few_bits_after_the_first_plan_and_not_before(size: int, link: list[float]) -> None:
    found = wires(size, FIRST + TRIAL + 2)
    assert set(found[: FIRST - 1]) == {"auto"} and found[-1] == "int8"


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [
        ({}, "int8"),
        ({"auto": 1.0, "fp16": 1.0}, "auto"),
        ({"auto": 1.04, "fp16": 1.0}, "auto"),
        ({"auto": 1.06, "fp16": 1.04}, "fp16"),
    ],
    ids=str,
)
def test_the_most_exact_one_that_is_about_as_fast_in_real_steps_is_taken(
    seconds: dict[str, float], wanted: str, link: list[float], trial: dict[str, float]
) -> None:
    link[0] = FAST
    trial.update(seconds)
    found = wires(2, FIRST + TRIAL + 2)
    turns = [name for name in ("auto", "fp16", "int8") for _ in range(plan_trial.TURN)]
    assert found == ["auto"] * (FIRST - 1) + turns * plan_trial.ROUNDS + [wanted] * 3


@pytest.mark.parametrize("wire", ["auto", "fp32", "int8"])
def test_where_dense_is_fastest_codecs_have_no_say(wire: str, link: list[float]) -> None:
    link.append(FAST)

    def body(rank: int, model: nn.Module) -> tuple[list[str], merging.Plan]:
        optimizer = wrap(model, compression="topk", merging="agmerge", exchange="auto", wire=wire)
        return train(model, optimizer, rank, range(FIRST)), optimizer.plan

    _, plan = agreed(on_ranks(2, MODEL, body))
    assert all(plan.dense) and send_mode(plan).codec == "auto"


@pytest.mark.parametrize(
    "options",
    [
        {"wire": "fp32"},
        {"wire": "sign"},
        {"memory": "none"},
        {"dense_sum": "ordered"},
        {"merging": "threshold"},
        {"merging": merging.Plan((3, 3))},
        {"exchange": "oktopk"},
        {"exchange": "masked"},
        {"num_groups": 2},
        {"sync": "updates", "merging": "agmerge"},
        {"compression": "powersgd", "rank": 2, "density": None},
    ],
    ids=str,
)
def test_what_the_script_says_stays(options: dict[str, Any], link: list[float]) -> None:
    if "num_groups" in options:
        options = {**options, "merging": "agmerge"}
    expected = options.get("wire") or ("sign" if options.get("sync") == "updates" else "auto")
    assert set(wires(2, FIRST + 3, **options)) == {expected}


def test_nothing_is_lost_while_codecs_change(link: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    link[0] = FAST
    sent = Sent(monkeypatch)

    def body(rank: int, model: nn.Module) -> tuple[list[str], list[merging.Plan]]:
        optimizer = wrap(model, compression="topk", merging="agmerge")
        return conserving(model, optimizer, lambda step: loss_of(model, rank, step), FIRST + TRIAL + 3, sent)

    seen, plans = agreed(on_ranks(2, MODEL, body))
    assert len(set(seen)) == len(plans) and len({send_mode(plan).codec for plan in plans}) == 3


def test_a_training_that_is_resumed_goes_on_in_the_same_wire_to_the_bit(link: list[float]) -> None:
    settled = FIRST + TRIAL + 2

    def straight(rank: int, model: nn.Module) -> tuple[dict[str, Any], Any, list[str], str]:
        optimizer = wrap(model, compression="topk", merging="agmerge")
        train(model, optimizer, rank, range(settled))
        saved = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
        return *saved, train(model, optimizer, rank, range(settled, settled + 3)), optimizer.stats()["values"]

    kept = on_ranks(2, MODEL, straight)

    def resumed(rank: int, model: nn.Module, **options: Any) -> tuple[list[str], str]:
        optimizer = wrap(model, compression="topk", merging="agmerge", **options)
        state, parameters, *_ = kept[rank]
        model.load_state_dict(parameters)
        optimizer.load_state_dict(state)
        return train(model, optimizer, rank, range(settled, settled + 3)), optimizer.stats()["values"]

    assert agreed(on_ranks(2, MODEL, resumed)) == kept[0][2:] and kept[0][3] != "auto"
    assert agreed(on_ranks(2, MODEL, lambda rank, model: resumed(rank, model, wire="fp32")))[1] == "fp32"


def looked_at_again(
    looks: int, monkeypatch: pytest.MonkeyPatch, change: Callable[[], None], **options: Any
) -> list[str]:
    """The wire after each step; after the first trial the world changes, and so many looks find that."""
    every, left = 5, [looks]

    def look(*_: object) -> replanner.Finding:
        left[0] -= 1
        return replanner.Finding.PROBE if left[0] >= 0 else replanner.Finding.KEEP

    monkeypatch.setattr(replanner.DriftDetector, "look", look)

    def body(rank: int, model: nn.Module) -> list[str]:
        planner = merging.get("agmerge", check_every=every)
        optimizer, found = wrap(model, compression="topk", merging=planner, **options), []
        for step in range(FIRST + 3 * TRIAL + 4 * every):
            if step == FIRST + TRIAL + 1:
                optimizer._reducer.exchange.group.comm.barrier("change").wait(10)
                change()
            train(model, optimizer, rank, [step])
            found.append(optimizer.stats()["values"])
        return found

    return agreed(on_ranks(2, MODEL, body))


def test_more_bits_are_taken_again_once_the_link_has_changed(
    link: list[float], trial: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def change() -> None:
        link[0] = FAST
        trial.update(auto=1.0, fp16=1.0)

    found = looked_at_again(1, monkeypatch, change)
    assert found[FIRST + TRIAL] == "int8" and found[-1] == "auto"


def test_fewer_bits_are_not_tried_where_they_are_not_predicted_to_gain(
    link: list[float], trial: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    link[0] = FAST
    trial.update(auto=1.0, fp16=1.0)
    found = looked_at_again(1, monkeypatch, lambda: trial.update(auto=1.3, fp16=1.3))
    assert set(found[FIRST + TRIAL :]) == {"auto"}


@pytest.mark.parametrize(("warmup", "first"), [(None, "auto"), (FIRST + TRIAL, "int8")], ids=["", "another density"])
def test_fewer_bits_are_taken_for_what_was_clearly_faster_twice_or_at_another_density(
    warmup: int | None, first: str, link: list[float], trial: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One look finds the change; a clear gain is looked at again by itself."""

    def change() -> None:
        link[0] = SLOW
        trial.update(auto=1.3, fp16=1.3)

    link[0] = FAST
    trial.update(auto=1.0, fp16=1.0)
    found = looked_at_again(1, monkeypatch, change, warmup=warmup)
    assert found[FIRST + TRIAL] == "auto"
    ended = found.index("int8", FIRST + TRIAL) + TRIAL
    assert found[ended : ended + 2] == [first] * 2 and found[-1] == "int8"


def test_tables_and_traces_say_it(link: list[float], tmp_path: Path) -> None:
    link[0] = FAST

    def body(rank: int, model: nn.Module) -> tuple[str, str]:
        optimizer = wrap(model, compression="topk", merging="agmerge")
        train(model, optimizer, rank, range(FIRST - 2))
        before = optimizer.merge_report()
        with optimizer.trace(tmp_path / "trace.json"):
            train(model, optimizer, rank, range(FIRST - 2, FIRST + TRIAL + 3))
        return before, optimizer.merge_report()

    for before, after in on_ranks(2, MODEL, body):
        assert "value format" not in before
        assert "value format: int8 (3e+03 ms per step with sparse, 2e+03 ms per step" in after
    events = json.loads((tmp_path / "trace.rank1.json").read_text())["traceEvents"]
    changes = 3 * plan_trial.ROUNDS - 1  # between its three turns in every round; the last one is taken
    assert sum(event["name"].startswith("values in") for event in events) == changes


@pytest.mark.parametrize(
    "options",
    [
        {"exchange": "two-level"},
        {"exchange": "auto"},
        {"compression": "dgc", "memory": "dgc"},
        {"density": "importance"},
        {"density": {".*": 0.2}},
        {"compression": "randomk"},
        {"sparsify": "ahead"},
        {"density": 1.0},
        {"dense": "partial"},
    ],
    ids=str,
)
def test_whatever_else_is_asked_for(
    options: dict[str, Any], link: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    if options.get("exchange") == "two-level":
        monkeypatch.setenv(topology.VARIABLE, "2")
    found = wires(4 if "two-level" in options.values() else 2, FIRST + TRIAL + 2, **options)
    assert set(found[: FIRST - 1]) == {"auto"} and found[-1] in ("fp16", "int8")


# -- plans that say it -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [SendMode(), SendMode(True), SendMode(codec="int8"), SendMode(True, "sign")])
def test_a_label_says_what_it_was_made_from(mode: SendMode) -> None:
    assert SendMode.parse(mode.label) == mode
    plan = merging.Plan((2,), labels=(mode.label,))
    assert with_send_mode(plan, codec="int4").labels == (SendMode(mode.ahead, "int4").label,)


@pytest.mark.parametrize("label", ["wire=int3", "int8", "ahead wires", "wire=auto"])
def test_other_words_are_refused(label: str) -> None:
    with pytest.raises(ValueError, match="has the word"):
        wrap(mlp(), compression="topk", merging=merging.Plan((6,), labels=(label,)))


def test_merge_buffers_of_several_wires_are_refused() -> None:
    with pytest.raises(ValueError, match=r"its merge buffers have different wires: .*int8.*Use one for all"):
        wrap(mlp(), compression="topk", merging=merging.Plan((3, 3), labels=("wire=int8", "")))


@pytest.mark.parametrize("options", [{"wire": "fp32"}, {"memory": "none"}, {"exchange": "oktopk"}])
def test_a_plan_with_a_wire_that_the_options_exclude_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="this plan sends values as int8"):
        wrap(mlp(), compression="topk", merging=merging.Plan((6,), labels=("wire=int8",)), **options)


def test_a_plan_of_the_script_may_say_the_wire_and_is_followed() -> None:
    plan = merging.Plan((3, 3), labels=("wire=int8",) * 2)

    def digests(rank: int, model: nn.Module, **options: Any) -> tuple[list[str], str]:
        optimizer = wrap(model, compression="topk", **options)
        return train(model, optimizer, rank, range(5)), optimizer.stats()["values"]

    said = agreed(on_ranks(2, MODEL, lambda rank, model: digests(rank, model, merging=plan)))
    given = agreed(
        on_ranks(2, MODEL, lambda rank, model: digests(rank, model, merging=merging.Plan((3, 3)), wire="int8"))
    )
    assert said == given and said[1] == "int8"
