# SPDX-License-Identifier: Apache-2.0
"""When measured times call for another plan: figures that can be checked by hand."""

from __future__ import annotations

import numpy as np
import pytest

import merging
from agmerge.planning.measuring import LATE, STEADY, DriftDetector, Finding
from merging import Curve, Measurements

PLAN = merging.Plan((1, 1), names=("a", "b"))
BACKWARD, EXCHANGE = 4.0, 1.0  # seconds: of both tensors, ready after 2 and 4; of each message
FINISH = BACKWARD + EXCHANGE
MEASURED = Measurements(
    profile=merging.Profile(["a", "b"], [10, 20], [2.0, 2.0]),
    sparsify=None,
    exchange=Curve((0,), (EXCHANGE,)),
    dense=None,
    modes=("dense",),
    workers=2,
)


def look(
    detector: DriftDetector, backward: float = BACKWARD, exchange: float = EXCHANGE, load: tuple[int, int] = (10, 20)
) -> Finding:
    """What a look finds if the second rank sees exchanges as they are, and the first one waits for it."""
    ready = np.array([backward / 2, backward])
    travel = np.array([[10 * exchange, exchange], [exchange, exchange]])
    return detector.look(PLAN, MEASURED, ready, travel, np.array(load))


def test_times_as_they_were_planned_for_keep_the_plan() -> None:
    detector = DriftDetector()
    assert [look(detector) for _ in range(4)] == [Finding.KEEP] * 4


@pytest.mark.parametrize("moved", [1.01, -1.01])
def test_backward_that_moved_is_planned_for_when_a_second_look_sees_it(moved: float) -> None:
    detector = DriftDetector()
    backward = BACKWARD + moved * LATE * FINISH
    assert [look(detector, backward) for _ in range(2)] == [Finding.KEEP, Finding.PLAN]


@pytest.mark.parametrize("factor", [STEADY[0] * 0.99, STEADY[1] * 1.01])
def test_exchanges_that_changed_are_probed_when_a_second_look_sees_it(factor: float) -> None:
    detector = DriftDetector()
    assert look(detector, exchange=3.0) is Finding.KEEP  # what the prediction leaves out is not a change
    assert [look(detector, exchange=3.0 * factor) for _ in range(2)] == [Finding.KEEP, Finding.PROBE]


def test_of_two_changes_the_one_that_asks_for_more_counts() -> None:
    detector = DriftDetector()
    assert look(detector, backward=3 * BACKWARD) is Finding.KEEP
    assert look(detector, exchange=3.0) is Finding.PROBE


def test_another_load_is_planned_for_at_once() -> None:
    assert look(DriftDetector(), load=(10, 10)) is Finding.PLAN
