# SPDX-License-Identifier: Apache-2.0
"""Rank 0 decides, every rank hears of it: what it decided, that it failed, or that a rank cannot follow."""

from __future__ import annotations

from typing import Any

import pytest

from agmerge import testing
from agmerge.errors import RankMismatchError
from agmerge.runtime import workers
from agmerge.step.agreed_state import decide_on_rank_0

TIMEOUT = 10.0


def on_three(body: Any) -> list[Any]:
    return testing.run(3, lambda rank: body(workers.world(), rank), return_errors=True)


def test_every_rank_gets_what_rank_0_decided_and_nobody_else_decides() -> None:
    def body(comm: Any, rank: int) -> tuple[Any, list[str]]:
        def decide() -> dict[str, Any]:
            assert rank == 0
            return {"plan": "single", "steps": [1, 2]}

        decision = decide_on_rank_0(comm, decide, lambda decision: "", TIMEOUT)
        return decision, [name for _, name, _ in testing.calls()]

    assert on_three(body) == [({"plan": "single", "steps": [1, 2]}, ["plan/length", "plan/data", "plan/digest"])] * 3


def test_without_a_reject_nothing_is_compared() -> None:
    def body(comm: Any, rank: int) -> list[str]:
        assert decide_on_rank_0(comm, lambda: {"x": rank}, None, TIMEOUT) == {"x": 0}
        return [name for _, name, _ in testing.calls()]

    assert on_three(body) == [["plan/length", "plan/data"]] * 3


@pytest.mark.parametrize("reject", [None, lambda decision: ""])
@pytest.mark.parametrize(("decider", "said"), [("", "ZeroDivisionError"), ("mine()", r"mine\(\)")])
def test_an_error_of_rank_0_is_every_ranks(decider: str, said: str, reject: Any) -> None:
    def body(comm: Any, rank: int) -> None:
        with pytest.raises(ValueError, match=f"there is no plan for this model: {said}: division by zero"):
            decide_on_rank_0(comm, lambda: {"x": 1 / 0}, reject, TIMEOUT, decider=decider)

    assert on_three(body) == [None] * 3


def test_what_json_cannot_say_is_an_error_of_every_rank() -> None:
    def body(comm: Any, rank: int) -> None:
        with pytest.raises(ValueError, match="no plan for this model: TypeError.*not JSON serializable"):
            decide_on_rank_0(comm, lambda: {"x": object()}, None, TIMEOUT)

    assert on_three(body) == [None] * 3


@pytest.mark.parametrize("who", [{0, 1, 2}, {1}])
def test_a_rank_that_cannot_follow_stops_all(who: set[int]) -> None:
    def body(comm: Any, rank: int) -> None:
        kind = ValueError if len(who) == 3 else RankMismatchError
        with pytest.raises(kind, match="too many tensors"):
            reject = "too many tensors" if rank in who else ""
            decide_on_rank_0(comm, lambda: {"x": 1}, lambda decision: reject, TIMEOUT)

    assert on_three(body) == [None] * 3
