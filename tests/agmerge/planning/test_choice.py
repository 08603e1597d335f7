# SPDX-License-Identifier: Apache-2.0
"""What selections are sent as: the order of modes, the rule and the reasons. Quantisers: test_quantiser_rule.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import merging
from agmerge.exchanges.routing import with_send_mode
from agmerge.planning.choice import CLEAR, DENSE_ALONE, HOPELESS_OTHERS, Choice, exactness
from agmerge.planning.plan_trial import Candidate
from merging import Curve, Measurements, Profile

MEASURED = Measurements(
    profile=Profile(["a"], [4], [0.0]),
    sparsify=None,
    exchange=Curve((0, 1), (0.0, 1.0)),
    dense=Curve((0, 1), (0.0, 0.5)),
    modes=("behind",),
    workers=2,
)
PLAN = merging.Plan((1,), names=("a",))


def choice() -> Choice:
    """One among two codecs beside the gradient's own dtype, and two exchanges beside the usual one."""
    config = SimpleNamespace(wires=("fp16", "int8"), exchanges=("masked", "oktopk"), quantisers=(), chooses_dense=True)
    buffers: Any = SimpleNamespace(plan=PLAN, comm=SimpleNamespace(size=2), config=config)
    return Choice(buffers, None)


def candidate(**mode: str) -> Candidate:
    return Candidate(with_send_mode(PLAN, **mode), MEASURED)


DENSE = Candidate(merging.Plan((1,), names=("a",), dense=(True,)), MEASURED)
OWN, FP16, INT8 = candidate(), candidate(codec="fp16"), candidate(codec="int8")
MASKED, OKTOPK = candidate(exchange="masked"), candidate(exchange="oktopk", codec="int8")


def test_dense_is_the_most_exact_then_usual_exchanges_and_of_these_more_bits() -> None:
    names = choice().names
    places = [exactness(each, names) for each in (DENSE, OWN, FP16, INT8, MASKED, OKTOPK)]
    assert places == sorted(set(places)) and places[-1] == len(names) - 1
    assert exactness(candidate(codec="sign"), names) == len(names)  # of a run with other options


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [
        ((1.04, 1.0, 1.0), 0),  # dense
        ((1.06, 1.0, 1.0), 1),
        ((1.06, 1.06, 1.0), 2),
    ],
)
def test_the_first_trial_takes_the_most_exact_one_within_5_percent(seconds: tuple[float, ...], wanted: int) -> None:
    assert choice().best([DENSE, OWN, MASKED], seconds, [0.0] * 3) == wanted


def test_of_two_plans_of_one_mode_the_faster_one_is_taken_and_the_reasons_stay() -> None:
    made = choice()
    divided = Candidate(merging.Plan((1,), names=("a",), parts=(2,)), MEASURED)
    made.settle([OWN, INT8], made.best([OWN, INT8], [1.0, 2.0], [0.0, 0.0]), [1.0, 2.0], 10)
    reasons = made.why()
    assert reasons == "1e+03 ms per step with sparse, 2e+03 ms per step with int8"
    number = made.best([OWN, divided], [1.0, 0.99], [0.0, 0.0])
    assert number == 1 and made.settle([OWN, divided], number, [1.0, 0.99], 20) == divided.plan
    assert made.why() == reasons


def test_what_is_in_use_is_left_for_less_exact_ones_that_were_clearly_faster_twice() -> None:
    made, tried = choice(), [OWN, INT8]
    made.settle([OWN], 0, (), 10)
    clear = [CLEAR + 0.01, 1.0]
    assert made.best(tried, clear, [0.0, 0.0]) == 0 and made.is_clear
    assert made.best(tried, [CLEAR - 0.01, 1.0], [0.0, 0.0]) == 0 and not made.is_clear
    assert [made.best(tried, clear, [0.0, 0.0]) for _ in range(2)] == [0, 1]
    assert not made.is_clear  # it is over: nothing is to be seen again


def test_without_a_trial_the_reason_is_the_prediction() -> None:
    made = choice()
    assert made.why() == ""
    assert made.settle([DENSE], 0, (), 10) == DENSE.plan
    assert made.why() == DENSE_ALONE.format(milliseconds=1e3 * DENSE.finish)
    made.settle([INT8], 0, (), 20)
    assert made.why() == HOPELESS_OTHERS
