# SPDX-License-Identifier: Apache-2.0
"""The quantised all-reduce among real workers, under every launcher: three, and two, whose messages are gathered."""

from __future__ import annotations

from typing import Any

import pytest
from quantised_scenarios import LEVELS, PLANS, ROADS, WAYS, in_memory
from quantised_workers import LAYERS
from scenarios import NAMED
from test_workers import Launches, cases, need

import merging
import sparsifiers
from agmerge.exchanges.routing import send_mode

Results = dict[str, list[Any]]

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    """All launches of this file."""
    return Launches(tmp_path_factory.mktemp("quantised"))


@pytest.fixture(scope="module", params=cases([("torchrun", 3), ("horovodrun, Gloo", 3)], 2, 3, 4))
def found(request: pytest.FixtureRequest, launches: Launches) -> Results:
    """Return what every rank wrote in `quantised`, from one launch."""
    need(request.param[0])
    return launches.of(*request.param, "quantised")


@pytest.fixture(scope="module", params=cases([("torchrun", 3)], 2, 3, 4))
def phases(request: pytest.FixtureRequest, launches: Launches) -> Results:
    """Return what every rank wrote in the other scenarios."""
    need(request.param[0])
    return launches.of(*request.param, *(name for name in NAMED if name != "quantised"))


@pytest.mark.parametrize("way", WAYS)
def test_replicas_and_updates_are_equal_to_the_bit_whatever_the_merge_buffers(found: Results, way: str) -> None:
    seen = [rank[f"{way}, {plan}"]["seen"] for rank in found["quantised"] for plan in PLANS]
    assert all(one == seen[0] for one in seen) and len(set(seen[0])) == len(seen[0]) > 2


def test_ranks_in_memory_have_the_same_updates_and_totals_whatever_the_backend(found: Results) -> None:
    ranks = found["quantised"]
    for seen, expected in zip(ranks, in_memory(len(ranks)), strict=True):
        assert set(expected) <= set(seen)
        assert [name for name in expected if seen[name] != expected[name]] == []


@pytest.mark.parametrize("way", WAYS)
def test_totals_say_what_was_sent_and_in_what(found: Results, way: str) -> None:
    _, name = WAYS[way]
    size = len(found["quantised"])
    for rank in found["quantised"]:
        stats = rank[f"{way}, single"]
        assert sum(stats["wire"].values()) == stats["bytes_sent"] and stats["density"] == 1.0
        assert set(stats["wire"]) == {name, "plain", "header"}
        # The second phase is as long as a shard. Beside bits there are scales; small tensors travel as they are.
        both = 1 if size == 2 or name == "onebit" else 1 + 1 / size
        share = stats["wire"][name] / both / stats["bytes_dense"]
        assert 0.8 < share / (sparsifiers.quantiser(name).bits / 32) < 1.4


@pytest.mark.parametrize("road", ROADS)
def test_replicas_are_equal_on_every_road(found: Results, road: str) -> None:
    ranks = [rank[road] for rank in found["quantised"]]
    if road == "process sets":  # the first and the last rank, and the others
        ends, others = ([ranks[0], ranks[-1]], ranks[1:-1]) if len(ranks) > 2 else (ranks[:1], ranks[1:])
        assert all(seen == ends[0] for seen in ends) and all(seen == others[0] for seen in others)
        assert ends[0] != others[0]
    else:
        assert all(seen == ranks[0] for seen in ranks) and len(set(ranks[0])) > 1


@pytest.mark.parametrize("name", LEVELS)
def test_replicas_are_equal_with_two_levels(found: Results, name: str) -> None:
    ranks = [rank[name] for rank in found["quantised"] if name in rank]
    assert all(seen == ranks[0] for seen in ranks)
    assert len(ranks) == (0 if name.endswith("two nodes") and len(found["quantised"]) % 2 else len(found["quantised"]))


def test_no_hook_waits_for_another_rank(phases: Results) -> None:
    """The last rank hands its first gradient over when the others have handed over all of theirs."""
    size = len(phases["order"])
    for rank in phases["order"]:
        before = rank["late"][: rank["late"].index("handed")]
        assert before.count("first") == (LAYERS if size > 2 else 0)
        assert rank["late"].count("second") == (LAYERS if size > 2 else 0)
    for rank in phases["order"][:-1]:  # without the last rank's gradients no first phase can end
        assert "second" not in rank["late"][: rank["late"].index("handed")]
    assert len({rank["after"] for rank in phases["order"]}) == 1


def test_second_phases_begin_during_backward_as_soon_as_the_first_one_has_ended(phases: Results) -> None:
    if len(phases["order"]) == 2:
        assert all(set(rank["overlapped"]) == {"hook", "handed"} for rank in phases["order"])  # one phase, of gathers
        return
    for rank in phases["order"]:
        calls = rank["overlapped"]
        ends = [place for place, call in enumerate(calls) if call in ("hook", "handed")][1:]
        begun = [(calls[:end].count("first"), calls[:end].count("second")) for end in ends]
        assert [first for first, _ in begun] == list(range(1, LAYERS + 1))
        assert all(layer <= second + 1 for layer, second in begun), calls  # all but perhaps the last gradient's
        assert calls.count("second") == LAYERS


def test_a_flipped_bit_is_the_same_error_on_all_ranks(phases: Results) -> None:
    told = phases["damaged"]
    assert all(one == told[0] for one in told) and len(told[0]) == (1 if len(told) == 2 else 2)
    assert all("the messages of ranks [1] were damaged" in text for text in told[0].values())


def test_what_the_default_settles_on_is_the_same_for_all_and_stays_in_a_checkpoint(phases: Results) -> None:
    ranks = phases["chosen"]
    assert all(seen == ranks[0] for seen in ranks) and len(set(ranks[0]["seen"])) == len(ranks[0]["seen"])
    plan = merging.Plan.loads(ranks[0]["plan"])
    mode = send_mode(plan)
    name, workers = mode.quantiser, mode.workers
    assert ranks[0]["states"][-1] == "settled" and "timing" in ranks[0]["states"] and workers == len(ranks)
    assert ranks[0]["quantiser"] == ("none" if all(plan.dense) else name)
    assert ranks[0]["again"] == [ranks[0]["plan"], ranks[0]["quantiser"]]
