# SPDX-License-Identifier: Apache-2.0
"""What training has shown of messages bounds what probes have found."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import merging
from agmerge.planning.cost_probe import MeasuredCosts
from agmerge.planning.measuring import SLACK, SeenMessages, bounded, bounded_dense, seen_in
from merging import Curve

SLOW = Curve((500,), (0.02,))  # all that there was room for
SIZES = st.lists(st.integers(1, 10**6), min_size=1, max_size=8, unique=True).map(sorted)
SECONDS = st.floats(1e-6, 10.0)


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    sizes = draw(SIZES)
    values = sorted(draw(st.lists(SECONDS, min_size=len(sizes), max_size=len(sizes))))
    return Curve(tuple(sizes), tuple(values))


def exchange_of(curve: Curve, load: int, seconds: float) -> Curve:
    """The cost of exchanges where all messages of a step, of ``load`` elements, took so many seconds."""
    seen = SeenMessages(work=0, load=load, making=math.nan, travel=seconds)
    return bounded(MeasuredCosts(None, curve, None), seen, 1, 1.0).exchange


def making_of(sparsify: Curve, message: Curve, seen: SeenMessages) -> tuple[Curve, Curve]:
    """The costs of selection and of messages, with seen ones."""
    found = bounded(MeasuredCosts(sparsify, SLOW, None, message), seen, 1, 1.0)
    assert found.sparsify is not None and found.message is not None
    return found.sparsify, found.message


def test_one_point_becomes_a_line() -> None:
    found = exchange_of(SLOW, 100_000, 0.25)
    assert found == Curve((500, 100_000), (0.02, 0.25))
    assert found(50_000) < 0.15 < found(65_000)


def test_a_probe_that_was_held_up_makes_no_larger_message_dear() -> None:
    """As found on two cores beside another job: 51 ms where 4 are usual, so a message of everything took a second."""
    probed = Curve((1196, 3585, 10753), (0.22e-3, 4.26e-3, 51.46e-3))
    assert probed(197_400) > 1.0
    found = exchange_of(probed, 197_400, 37.5e-3)
    assert found(197_400) == 37.5e-3 and found(10_753) < 5e-3
    assert found(1196) == probed(1196)


def test_what_is_within_the_bounds_stays_as_it_was_probed() -> None:
    probed = Curve((500, 50_000, 200_000), (0.002, 0.06, 0.2))
    assert exchange_of(probed, 100_000, 0.11) == probed
    for nothing in (0.0, math.nan):
        assert exchange_of(probed, 100_000, nothing) == probed
    assert exchange_of(probed, 0, 0.1) == probed


@given(curves(), st.integers(1, 10**7), SECONDS)
def test_a_share_of_the_elements_takes_no_more_than_about_that_share(curve: Curve, load: int, seconds: float) -> None:
    found = exchange_of(curve, load, seconds)
    assert found(load) <= max(seconds, curve(load)) and found(load) <= found(0) + SLACK * seconds * (1 + 1e-9)
    for at, value in zip(curve.elements, curve.seconds, strict=True):
        assert found(at) <= value
        assert found(at) <= found(0) + SLACK * seconds * at / load * (1 + 1e-9)


@given(curves(), curves(), SECONDS)
def test_selection_and_packing_together_take_no_more_than_was_seen(
    sparsify: Curve, message: Curve, making: float
) -> None:
    sparsify = Curve((0, *sparsify.elements), (0.0, *sparsify.seconds))
    selecting, packing = making_of(sparsify, message, SeenMessages(work=10**8, load=10**7, making=making, travel=1.0))
    start = message.seconds[0]
    assert selecting(0) == 0.0 and packing(0) == start
    assert packing(10**7) - start <= making * (1 + 1e-9)
    together = selecting(10**8) + packing(10**7) - start
    assert together <= making + selecting.seconds[-2] + 1e-9  # but for a probe of less that took as long
    for at, value in zip(message.elements, message.seconds, strict=True):
        assert packing(at) <= value and packing(at) <= start + SLACK * making * at / 10**7 * (1 + 1e-9)


def test_selection_is_what_packing_leaves() -> None:
    sparsify, message = Curve((0, 1, 1000), (0.0, 0.1, 0.1)), Curve((10, 20), (1.0, 2.0))
    seen = SeenMessages(work=10_000, load=100, making=5.0, travel=9.0)
    selecting, packing = making_of(sparsify, message, seen)
    assert packing == Curve((10, 20, 100), (1.0, 2.0, 6.0)) and selecting(10_000) == 0.1
    selecting, packing = making_of(sparsify, Curve((10, 20), (1.0, 1.1)), seen)
    assert packing(100) == pytest.approx(1.9) and selecting(10_000) == pytest.approx(4.1)
    assert making_of(sparsify, message, seen._replace(making=math.nan)) == (sparsify, message)


def test_a_dense_cost_of_one_size_is_no_constant() -> None:
    found = bounded_dense(Curve((50_000,), (0.07,)), 10**6, 1.21)
    assert found == Curve((50_000, 10**6), (0.07, 1.21))
    one_after_the_other = bounded_dense(Curve((50_000,), (0.05,)), 10**6, 1.21)
    assert one_after_the_other(10**6) == pytest.approx(20 * 0.05)
    two = bounded_dense(Curve((50_000, 150_000), (0.05, 0.15)), 10**6, 1.21)
    assert two(10**6) == pytest.approx(1.0) and two(10**5) == pytest.approx(0.1)
    assert bounded_dense(Curve((50_000,), (0.05,)), 50_000, 1.21).elements == (50_000,)


def test_a_dense_cost_is_no_more_than_about_that_of_as_many_bytes() -> None:
    held_up = Curve((50_000, 150_000), (0.05, 5.0))
    found = bounded_dense(held_up, 10**6, 1.21)
    assert held_up(10**6) > 40 > SLACK * 1.21 + 0.05 == pytest.approx(found(10**6))


def test_small_messages_that_were_held_up_make_no_dense_exchange_cheap() -> None:
    """As found at 12 Mbit/s: with messages that all seem to take 10 ms, 0.5 s of a dense exchange were cut to 28 ms."""
    sizes, dense = (410, 820, 1639), Curve((8192, 16384), (22.85e-3, 44.59e-3))
    costs = MeasuredCosts(Curve((0, 1), (0.0, 1e-4)), Curve(sizes, (10e-3,) * 3), dense, Curve((0,), (1e-4,)))
    seen = SeenMessages(work=188_416, load=13_868, making=5e-3, travel=9e-3)
    found = bounded(costs, seen, 189_440, 4.34)
    assert 9e-3 <= found.exchange(410) <= found.exchange(13_868) <= 10e-3
    assert found.dense is not None and found.dense(189_440) == pytest.approx(dense(189_440)) and dense(189_440) > 0.5
    held_up = bounded(costs._replace(dense=Curve((8192, 16384), (20e-3, 1.0))), seen, 189_440, 4.34)
    in_a_row = 9e-3 * 4.34 * 189_440 / 13_868
    assert held_up.dense is not None and held_up.dense(189_440) == pytest.approx(20e-3 + SLACK * in_a_row)


PROFILE = merging.Profile(
    ["a", "b", "c"], [600, 400, 300], np.ones(3), work=np.array([600, 400, 300]), load=np.array([60, 40, 30])
)


def test_what_goes_dense_is_no_message() -> None:
    two, times = np.array([[0.5, 0.25]]), np.array([[0.25, 0.125]])
    whole = seen_in(merging.Plan((2, 1)), PROFILE, two, times)
    assert whole == SeenMessages(1300, 130, 0.75, 0.375)
    assert seen_in(merging.Plan((2, 1), dense=(True, False)), PROFILE, two, times) == SeenMessages(300, 30, 0.25, 0.125)
    assert seen_in(merging.Plan((3,), dense=(True,)), PROFILE, np.ones((1, 1)), np.ones((1, 1))) is None
    divided = seen_in(merging.Plan((2, 1), parts=(1, 2)), PROFILE, two, times)
    assert divided is not None and math.isnan(divided.making) and divided.travel == 0.375


def test_who_waits_for_late_ranks_does_not_say_how_long_an_exchange_takes() -> None:
    making, travel = np.array([[0.5, 0.25], [0.25, 0.5]]), np.array([[0.25, 2.0], [4.0, 0.125]])
    assert seen_in(merging.Plan((2, 1)), PROFILE, making, travel) == SeenMessages(1300, 130, 1.0, 0.375)


def test_a_dense_class_has_no_selection() -> None:
    costs = MeasuredCosts(None, Curve((500,), (0.02,)), None, Curve((0,), (1e-3,)))
    found = bounded(costs, SeenMessages(0, 10_000, 0.1, 0.3), 10_000, 1.0)
    assert found == costs._replace(exchange=Curve((500, 10_000), (0.02, 0.3)))
