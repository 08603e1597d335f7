# SPDX-License-Identifier: Apache-2.0
"""Where survivors go on, and who gives results to whom."""

from __future__ import annotations

import pytest
import torch

from agmerge import testing
from agmerge.errors import PeerLost
from agmerge.runtime import workers
from agmerge.step.kept_results import NEW, KeptResults, Position, Settled, packed, settle, unpacked


def settled(positions: list[Position], *, gives: bool = False) -> list[Settled | BaseException]:
    """Settle ranks at ``positions``, each with one result in both rounds that says whose it is."""

    def body(rank: int) -> Settled:
        kept = KeptResults()
        kept.keep("before", torch.tensor([rank]))
        kept.conclude()
        kept.keep("now", torch.tensor([rank, rank]))
        return settle(workers.world(), positions[rank], kept, 10.0, gives=gives)

    return testing.run(len(positions), body, return_errors=True)


def test_results_travel_as_they_are() -> None:
    results = {"a": torch.arange(7, dtype=torch.uint8), "b/sum": torch.zeros(0, dtype=torch.uint8)}
    found = unpacked(packed(results))
    assert found.keys() == results.keys()
    assert all(torch.equal(found[name], results[name]) for name in results)


def test_where_all_are_at_one_place_nothing_is_sent() -> None:
    for found in settled([Position(3, 1)] * 3):
        assert isinstance(found, Settled) and found.position == Position(3, 1) and not found.results


@pytest.mark.parametrize(
    ("positions", "name", "donor"),
    [([(3, 1), (3, 2), (3, 2)], "now", 1), ([(4, 0), (3, 2), (3, 1)], "before", 0)],
)
def test_the_lowest_rank_that_is_ahead_gives_the_results(
    positions: list[tuple[int, int]], name: str, donor: int
) -> None:
    for found in settled([Position(*one) for one in positions]):
        assert isinstance(found, Settled) and found.position == max(Position(*one) for one in positions)
        assert list(found.results) == [name] and int(found.results[name].clone().view(torch.int64)[0]) == donor


def test_newcomers_are_named_and_have_a_donor() -> None:
    for found in settled([Position(5, 0), NEW, Position(5, 0)], gives=True):
        assert isinstance(found, Settled) and (found.donor, found.new) == (0, (1,)) and not found.results


def test_where_all_are_new_the_first_is_the_donor() -> None:
    for found in settled([NEW, NEW]):
        assert isinstance(found, Settled) and (found.donor, found.new, found.position) == (0, (0, 1), NEW)


def test_a_newcomer_that_is_not_expected_is_an_error_on_all() -> None:
    assert all(isinstance(found, PeerLost) for found in settled([Position(5, 0), NEW]))
