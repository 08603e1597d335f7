"""What training has shown of messages counts where probes end far before."""

from __future__ import annotations

import numpy as np

import merging
from agmerge.planning.seen_messages import with_seen, with_volume
from merging import Curve

SLOW = Curve((500,), (0.02,))  # all that there was room for


def test_one_point_becomes_a_line() -> None:
    plan = merging.Plan((2, 1))
    found = with_seen(SLOW, plan, [60_000, 40_000, 30_000], np.array([0.25, 0.3]))
    assert found == Curve((500, 100_000), (0.02, 0.25))
    assert found(50_000) < 0.15 < found(65_000)


def test_what_goes_dense_is_no_message_of_it() -> None:
    plan = merging.Plan((2, 1), dense=(True, False))
    assert with_seen(SLOW, plan, [60_000, 40_000, 30_000], np.array([0.25, 0.1])).elements == (500, 30_000)
    assert with_seen(SLOW, merging.Plan((3,), dense=(True,)), [1, 1, 1], np.ones(1)) == SLOW


def test_probes_know_more_of_what_is_near_and_no_cost_falls() -> None:
    plan, load = merging.Plan((1,)), 2000
    assert with_seen(SLOW, plan, [load], np.array([9.0])) == SLOW  # four times 500
    assert with_seen(SLOW, plan, [load + 1], np.array([9.0])) != SLOW
    assert with_seen(SLOW, plan, [load * 100], np.array([0.01])) == SLOW
    assert with_seen(SLOW, plan, [load * 100], np.array([np.nan])) == SLOW


def test_a_dense_cost_of_one_size_is_no_constant() -> None:
    exchange = Curve((0, 100_000), (0.01, 0.31))
    found = with_volume(Curve((50_000,), (0.05,)), exchange, 10**6, 0.4)
    assert found.elements == (50_000, 10**6) and found(10**6) == exchange(400_000) > 1.0
    two = Curve((50_000, 150_000), (0.05, 0.15))
    assert with_volume(two, exchange, 10**6, 0.4) == two
    assert with_volume(Curve((50_000,), (0.05,)), exchange, 50_000, 0.4).elements == (50_000,)
