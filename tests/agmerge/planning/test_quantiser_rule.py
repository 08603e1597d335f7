# SPDX-License-Identifier: Apache-2.0
"""Which of several candidates is gone on with: pure functions of what steps have taken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import merging
from agmerge.exchanges.routing import SendMode, send_mode, why_labels_are_wrong, with_send_mode
from agmerge.planning.choice import ABOUT, AGAIN, CLEAR, HOPELESS, MOST, Choice, exactness, taken
from agmerge.planning.plan_trial import Candidate
from merging import Curve, Measurements, Profile

NAMES = ("none", "int8", "eden-4", "eden-2")
MEASURED = Measurements(
    profile=Profile(["a"], [4], [0.0]),
    sparsify=None,
    exchange=Curve((0, 1), (0.0, 1.0)),
    dense=None,
    modes=("ahead",),
    workers=2,
)
W = 2


def candidate(name: str, now: str = "eden-4") -> Candidate:
    """What travels in ``name``; dense it has the label of what is in use ``now``."""
    is_dense = name == "none"
    plan = merging.Plan((1,), names=("a",), dense=(is_dense,))
    quantiser = now if is_dense else name
    return Candidate(with_send_mode(plan, quantiser=quantiser), MEASURED)


def choice(seconds: dict[str, float], doubts: dict[str, float] | None = None) -> str:
    tried = [candidate(name) for name in seconds]
    found = taken(tried, NAMES, list(seconds.values()), [(doubts or {}).get(name, 0.0) for name in seconds])
    return list(seconds)[found]


def test_the_figures_of_the_rule() -> None:
    assert (ABOUT, HOPELESS, MOST, CLEAR, AGAIN) == (1.05, 1.5, 3, 1.2, 1000)


@pytest.mark.parametrize(
    ("seconds", "doubts", "wanted"),
    [
        ({"eden-2": 1.0, "eden-4": 1.04, "int8": 1.06, "none": 2.0}, {}, "eden-4"),
        ({"eden-2": 1.0, "eden-4": 1.06, "int8": 1.04, "none": 1.051}, {}, "int8"),
        ({"eden-2": 1.0, "eden-4": 1.04, "int8": 1.06, "none": 1.05}, {}, "none"),
        ({"eden-2": 1.0, "eden-4": 1.2, "int8": 1.3, "none": 1.4}, {}, "eden-2"),
        ({"eden-2": 1.0, "none": 1.4}, {"none": 0.35}, "none"),  # in doubt the more exact one
        ({"eden-2": 1.0, "none": 1.4}, {"none": 0.34}, "eden-2"),
        ({"eden-2": 1.0, "none": 1.4}, {"eden-2": 0.9}, "eden-2"),  # its own doubt is no reason
        ({"none": 1.0, "eden-2": 1.0}, {}, "none"),
        ({"eden-2": 1.0}, {}, "eden-2"),
    ],
    ids=str,
)
def test_the_most_exact_one_within_5_percent_less_its_doubt(
    seconds: dict[str, float], doubts: dict[str, float], wanted: str
) -> None:
    assert choice(seconds, doubts) == wanted
    assert choice(dict(reversed(seconds.items())), doubts) == wanted


def test_what_goes_dense_is_the_most_exact_whatever_its_label_says() -> None:
    assert [exactness(candidate(name, now="eden-2"), NAMES) for name in NAMES] == [0, 1, 2, 3]
    assert exactness(candidate("none"), ("int8", "eden-4")) == 1  # between nodes nothing goes dense: that is its label


def choice_of(plan: merging.Plan, workers: int = W) -> Choice:
    """That of an agreement of so many workers on this plan."""
    config = SimpleNamespace(
        compression=SimpleNamespace(compressor=SimpleNamespace(candidates=NAMES, most_workers={})), quantisers=NAMES[1:]
    )
    buffers: Any = SimpleNamespace(plan=plan, comm=SimpleNamespace(size=workers), config=config)
    zeros: Any = SimpleNamespace(share=lambda: 0.0)
    return Choice(buffers, zeros)


def settled(name: str, step: int = 0) -> Choice:
    """One that has chosen ``name`` before ``step``."""
    made = choice_of(merging.Plan((1,), names=("a",)))
    assert made.is_open and made.may_change(step)
    made.settle([candidate(name)], 0, (), step)
    assert not made.is_open and made.is_on(candidate(name))
    return made


def again(made: Choice, step: int, **seconds: float) -> str:
    """What is settled on after a trial: by name with underscores for hyphens."""
    named = {name.replace("_", "-"): took for name, took in seconds.items()}
    tried = [candidate(name) for name in named]
    number = made.best(tried, list(named.values()), [0.0] * len(tried))
    made.settle(tried, number, list(named.values()), step)
    return list(named)[number]


def test_no_other_one_is_chosen_in_a_thousand_steps() -> None:
    made = settled("eden-4", step=10)
    assert not made.may_change(11) and not made.may_change(10 + AGAIN - 1) and made.may_change(10 + AGAIN)
    assert again(made, 10 + AGAIN, eden_4=1.0, eden_2=0.99) == "eden-4"
    assert not made.may_change(11 + AGAIN)  # it was asked, and stays


def test_something_more_exact_is_taken_at_once() -> None:
    assert again(settled("eden-4"), AGAIN, int8=1.04, eden_4=1.0) == "int8"
    assert again(settled("int8"), AGAIN, none=1.04, int8=1.0) == "none"


def test_something_less_exact_is_taken_for_20_percent_seen_twice() -> None:
    made = settled("int8")
    assert again(made, AGAIN, int8=1.21, eden_4=1.0) == "int8"
    assert made.is_clear and made.may_change(AGAIN + 1)  # it is looked at again
    assert again(made, AGAIN + 100, int8=1.21, eden_4=1.0) == "eden-4"
    assert not made.may_change(AGAIN + 101)


@pytest.mark.parametrize("between", [{"int8": 1.19, "eden_4": 1.0}, {"int8": 1.0, "eden_4": 1.0}], ids=str)
def test_20_percent_seen_once_and_not_again_is_none(between: dict[str, float]) -> None:
    made = settled("int8")
    for step in (AGAIN, 3 * AGAIN):
        assert again(made, step, int8=1.21, eden_4=1.0) == "int8"
        assert again(made, step + 100, **between) == "int8"
        assert not made.is_clear and not made.may_change(step + 101)


def test_a_trial_of_one_candidates_plans_says_nothing_of_the_others() -> None:
    made = settled("eden-2")
    assert again(made, 50, eden_2=1.0) == "eden-2"
    assert made.may_change(AGAIN) and not made.may_change(AGAIN - 1)


def test_a_plan_keeps_the_choice_for_as_many_workers() -> None:
    chosen = settled("eden-2", 7).settle([candidate("eden-2")], 0, (), 7)
    assert send_mode(chosen) == SendMode(quantiser="eden-2", workers=W)
    assert not choice_of(chosen).is_open and choice_of(chosen, W + 1).is_open
    tried = with_send_mode(chosen, quantiser="int8", workers=0)  # its turn in a trial
    assert choice_of(tried).is_open
    made = choice_of(merging.Plan((1,), names=("a",)))
    made.take_over(chosen, 5000)
    assert not made.may_change(5000 + AGAIN - 1) and made.may_change(5000 + AGAIN)


def test_all_merge_buffers_have_the_same_bits_and_any_may_go_dense() -> None:
    labels = [SendMode(quantiser=name, workers=2).label for name in ("eden-2", "eden-4")]
    why = why_labels_are_wrong(merging.Plan((1, 1), labels=tuple(labels)))
    assert "different quantizers: eden-2 for 2 workers, eden-4 for 2 workers. Use one for all" in why
    same = merging.Plan((1, 1), labels=(labels[0],) * 2, dense=(True, False))
    assert why_labels_are_wrong(same) == "" and send_mode(same) == SendMode(quantiser="eden-2", workers=2)


def test_a_plan_says_all_that_decides_about_bits_and_is_refused_where_that_differs() -> None:
    (label,) = with_send_mode(merging.Plan((1,)), quantiser="eden-2", workers=3).labels
    assert label == "quantiser=eden-2 workers=3 codec=2 seed=0"
    assert SendMode.parse(label) == SendMode(quantiser="eden-2", workers=3)
    assert SendMode.parse("quantiser=eden-2 workers=3") == SendMode.parse(label)  # of before
    assert SendMode.parse("quantizer=eden-2 workers=3") == SendMode.parse(label)
    for word, other in {"codec=2": "codec=1", "seed=0": "seed=1"}.items():
        problem = why_labels_are_wrong(merging.Plan((1,), labels=(label.replace(word, other),)))
        assert f"has {other!r}, but this version sends other bits" in problem


def test_reports_have_every_candidate_that_was_tried() -> None:
    tried = [candidate("eden-2"), candidate("none")]
    made = choice_of(merging.Plan((1,), names=("a",)))
    made.settle(tried, 0, [0.5, 0.25], 10)
    assert made.why() == "500 ms per step with eden-2, 250 ms per step with none"
