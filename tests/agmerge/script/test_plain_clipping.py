# SPDX-License-Identifier: Apache-2.0
"""A script that clips a worker's own gradients, with ``sync="updates"``, is told once; others never."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from support import gradients, loss_of, mlp, on_ranks, seeded
from support.updates import updating
from torch import nn

from agmerge.engine.gradient_clipping import clipping_as_mean
from agmerge.engine.update_reducer import UpdateReducer

MODEL = seeded(mlp)
BOUND = 0.05
Change = Callable[[Any, nn.Module, int], object]


def torchs(optimizer: Any, model: nn.Module, step: int) -> object:
    return nn.utils.clip_grad_norm_(model.parameters(), BOUND)


def said(change: Change, ratio: float, monkeypatch: pytest.MonkeyPatch, sets_zeros: bool = False) -> list[str]:
    """The warnings of some steps, on two ranks."""
    monkeypatch.setattr(UpdateReducer, "norm_ratio", property(lambda self: ratio))

    def body(rank: int, model: nn.Module) -> None:
        optimizer = updating(model)
        for step in range(8):
            optimizer.zero_grad(set_to_none=not sets_zeros)
            for number in range(2):
                loss_of(model, rank, 2 * step + number).backward()
            change(optimizer, model, step)
            optimizer.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_ranks(2, MODEL, body)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("sets_zeros", [False, True])
def test_a_script_that_clips_by_itself_is_told_once(monkeypatch: pytest.MonkeyPatch, sets_zeros: bool) -> None:
    (text,) = said(torchs, 0.5, monkeypatch, sets_zeros)
    assert text.startswith("AGM126: ") and "to the norm 0.05." in text and "about 50% of theirs" in text
    assert "one of 0.025 for the average" in text and "optimizer.clip_grad_norm_(0.05)" in text


def test_where_the_average_is_hardly_smaller_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    def hookless(optimizer: Any, model: nn.Module, step: int) -> object:
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
        return torchs(optimizer, model, step)

    assert said(hookless, 1.0, monkeypatch) == []


def ours(optimizer: Any, model: nn.Module, step: int) -> object:
    return optimizer.clip_grad_norm_(BOUND)


def frameworks(optimizer: Any, model: nn.Module, step: int) -> object:
    return clipping_as_mean(nn.utils.clip_grad_norm_, lambda: optimizer._reducer)(model.parameters(), BOUND)


def constant(optimizer: Any, model: nn.Module, step: int) -> object:
    return [one.div_(3.0) for one in gradients(model).values() if one is not None]


def changing(optimizer: Any, model: nn.Module, step: int) -> object:
    """As by the number of tokens of a batch."""
    return [one.div_(2.0 + step % 3) for one in gradients(model).values() if one is not None]


def wide(optimizer: Any, model: nn.Module, step: int) -> object:
    return nn.utils.clip_grad_norm_(model.parameters(), 1e6)


def by_value(optimizer: Any, model: nn.Module, step: int) -> object:
    return nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def nothing(optimizer: Any, model: nn.Module, step: int) -> object:
    return None


@pytest.mark.parametrize("change", [ours, frameworks, constant, changing, wide, by_value, nothing])
def test_other_scripts_are_told_nothing(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    assert said(change, 0.5, monkeypatch) == []


def test_it_watches_one_tensor_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UpdateReducer, "norm_ratio", property(lambda self: 0.5))

    def body(rank: int, model: nn.Module) -> list[int]:
        def hooked() -> int:
            return sum(bool(parameter._post_accumulate_grad_hooks) for parameter in model.parameters())

        optimizer, seen = updating(model), []
        for step in range(2):
            loss_of(model, rank, step).backward()
            optimizer.step()
            seen.append(hooked())
        optimizer.close()
        return [*seen, hooked()]

    assert on_ranks(2, MODEL, body) == [[1, 1, 0], [0, 0, 0]]
