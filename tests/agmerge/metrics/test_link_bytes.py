# SPDX-License-Identifier: Apache-2.0
"""What leaves a rank of each collective: against its algorithm, carried out piece by piece."""

from __future__ import annotations

import pytest

from agmerge.metrics import totals
from agmerge.metrics.totals import Totals


def pieces(size: int, workers: int) -> list[int]:
    """The bytes of the pieces of a ring, as equal as they can be."""
    return [size // workers + (number < size % workers) for number in range(workers)]


def ring(size: int, workers: int, halves: int) -> list[int]:
    """What each rank sends in a ring: a piece in each of W - 1 rounds, in one half of an all-reduce or in both."""
    sent = [0] * workers
    for half in range(halves):
        for round_ in range(workers - 1):
            for rank in range(workers):
                sent[rank] += pieces(size, workers)[(rank + half - round_) % workers]
    return sent


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("size", [0, 1, 60, 61, 4099])
def test_rings_move_that_much_on_average_rounded_up(workers: int, size: int) -> None:
    for halves, ours in ((2, totals.all_reduce_bytes), (1, totals.reduce_scatter_bytes)):
        total = sum(ring(size, workers, halves))
        assert total <= workers * ours(size, workers) < total + workers


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_a_gather_passes_every_message_on_but_the_last(workers: int) -> None:
    held, sent = [{rank} for rank in range(workers)], [0] * workers
    for round_ in range(workers - 1):
        for rank in range(workers):
            sent[rank] += 10
            held[(rank + 1) % workers].add((rank - round_) % workers)
    assert all(messages == set(range(workers)) for messages in held)
    assert sent == [totals.all_gather_bytes(10, workers)] * workers


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("root", [0, 2])
def test_a_broadcast_reaches_all_others_once(workers: int, root: int) -> None:
    root %= workers
    sent = [totals.broadcast_bytes(8, workers, rank, root) for rank in range(workers)]
    assert sum(sent) == 8 * (workers - 1)
    assert sent[(root - 1) % workers] == 0


def test_what_a_rank_keeps_of_an_all_to_all_goes_nowhere() -> None:
    assert totals.all_to_all_bytes([3, 4, 5], 1) == 8
    assert totals.all_to_all_bytes([7], 0) == 0


def test_dense_link_bytes_follow_the_number_of_workers() -> None:
    counted = Totals()
    counted.stepped(1, 30, 30)
    assert (counted.bytes_dense, counted.link_bytes_dense) == (120, 0)
    counted.among(4)
    counted.stepped(1, 30, 30)
    counted.skipped(30, 30)
    counted.passed(30)
    assert (counted.bytes_dense, counted.link_bytes_dense) == (480, 3 * 180)
