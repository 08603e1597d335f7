# SPDX-License-Identifier: Apache-2.0
"""A script that saves the plain optimizer's state alone is told, once, that ranks keep more."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from support import mlp, on_ranks, seeded, sgd, train, wrap
from torch import nn

import agmerge
from agmerge.integrations import unsaved

MODEL = seeded(mlp)
KEEPING: list[dict[str, Any]] = [
    {"compression": "topk"},
    {"compression": "dgc"},  # the plain optimizer has nothing by parameter then
    {"sync": "updates"},
]


def said(call: Callable[[], Any]) -> list[str]:
    """The warnings of a call that are about what was saved."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [text for warning in caught if "AGM403" in (text := str(warning.message))]


class Script:
    """Steps with an optimizer of which ``unsaved`` sees the plain one."""

    def __init__(self, model: nn.Module, rank: int, options: dict[str, Any]) -> None:
        self.inner = sgd(model)
        self._model, self._rank, self._steps = model, rank, 0
        self.optimizer: agmerge.DistributedOptimizer = wrap(model, self.inner, **options)
        self.whole, self.look_later, self.end = unsaved.watch(self.optimizer._reducer, [self.inner])

    def step(self) -> list[str]:
        """What one more step says."""
        self._steps += 1
        return said(lambda: train(self._model, self.optimizer, self._rank, range(self._steps, self._steps + 1)))


@pytest.mark.parametrize("options", KEEPING, ids=str)
def test_the_step_after_tells_once(options: dict[str, Any]) -> None:
    def body(rank: int, model: nn.Module) -> None:
        script = Script(model, rank, options)
        assert script.step() == [] and said(script.inner.state_dict) == []  # the rest may still be saved
        (text,) = script.step()
        assert "compressed.state_dict()" in text and "compressed.load_state_dict()" in text
        assert (", the optimizer state and residuals of each" in text) is ("sync" in options)
        script.inner.state_dict()
        assert script.step() == []

    on_ranks(1, MODEL, body)


@pytest.mark.parametrize("options", KEEPING, ids=str)
@pytest.mark.parametrize("first", [True, False])
def test_who_saves_all_of_it_in_any_order_is_told_nothing(options: dict[str, Any], first: bool) -> None:
    def body(rank: int, model: nn.Module) -> None:
        script = Script(model, rank, options)
        for _ in range(2):
            assert script.step() == []
            calls = [script.whole, script.inner.state_dict]
            for call in calls if first else reversed(calls):
                call()
        assert script.step() == []
        script.inner.state_dict()
        assert len(script.step()) == 1  # what was saved before the last step counts no more

    on_ranks(1, MODEL, body)


@pytest.mark.parametrize("compression", ["none", "eden", "auto"])
def test_where_nothing_is_kept_nothing_is_said(compression: str) -> None:
    def body(rank: int, model: nn.Module) -> None:
        script = Script(model, rank, {"compression": compression})
        for _ in range(3):
            assert script.step() == []
            script.inner.state_dict()

    on_ranks(1, MODEL, body)


def test_before_the_first_step_there_is_nothing_to_keep() -> None:
    def body(rank: int, model: nn.Module) -> None:
        for options in KEEPING:
            script = Script(model, rank, options)
            script.inner.state_dict()
            assert script.step() == []
            script.optimizer.close()

    on_ranks(1, MODEL, body)


@pytest.mark.parametrize("closes", [True, False])
def test_the_last_checkpoint_is_told_of_at_the_end(closes: bool) -> None:
    def body(rank: int, model: nn.Module) -> list[str]:
        script: Script | None = Script(model, rank, {"compression": "topk"})
        assert script is not None and script.step() == []
        script.inner.state_dict()
        if closes:
            return said(script.end)

        def leave() -> None:
            nonlocal script
            script = None
            gc.collect()

        return said(leave)

    ((_,),) = on_ranks(1, MODEL, body)


def test_rank_0_tells() -> None:
    def body(rank: int, model: nn.Module) -> int:
        script = Script(model, rank, {"compression": "topk"})
        train(model, script.optimizer, rank, range(1))
        script.inner.state_dict()
        train(model, script.optimizer, rank, range(1, 2))
        return 0

    assert len(said(lambda: on_ranks(2, MODEL, body))) == 1


@pytest.mark.parametrize("alone", [True, False])
def test_a_checkpoint_of_one_rank_is_looked_at_when_all_have_gone_on(alone: bool) -> None:
    """Not before two more exchanges are over: the other ranks may be about to save. Once."""
    looked: list[int] = []

    def look() -> dict[str, Any]:
        looked.append(1)
        lacks = {"folder": "AGM403", "saved": "rank 0", "missing": "rank 1 has", "size": 2}
        return lacks if alone else {}

    def body(rank: int, model: nn.Module) -> None:
        script = Script(model, rank, {"compression": "topk"})
        script.step()
        script.look_later(look)
        assert script.step() == script.step() == [] and not looked
        assert len(script.step()) == alone and looked == [1]
        script.look_later(look)
        assert [script.step() for _ in range(4)] == [[]] * 4
        script.end()

    on_ranks(1, MODEL, body)
