# SPDX-License-Identifier: Apache-2.0
"""State of a script's own objects: what is copied before a round, what is restored after one, and what is an option."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sparsifiers.custom import Custom
from sparsifiers.object_state import ObjectState


class Kept:
    """Object with a residual, which a round replaces or writes to, as a test says."""

    def __init__(self) -> None:
        self.ratio, self.calls = 0.1, 0
        self.residuals: dict[str, Tensor] = {"w": torch.arange(3.0)}
        self.pairs: dict[str, Any] = {}
        self.basis: Tensor | None = None
        self.generator = torch.Generator().manual_seed(1)

    def replace(self) -> None:
        self.calls += 1
        self.residuals["w"] = self.residuals["w"] + 1
        self.pairs["w"] = [torch.full((2,), float(self.calls)), "text"]

    def write(self) -> None:
        self.calls += 1
        self.residuals["w"] += 1

    def write_and_replace(self) -> None:
        array = self.residuals["w"].numpy()
        array += 1  # which no version of a tensor counts
        self.residuals["w"] = torch.from_numpy(np.array(array))


def is_lent(state: dict[str, Any], given: Kept) -> bool:
    return state["residuals"]["w"] is given.residuals["w"]


@pytest.mark.parametrize("way, lends", [("replace", True), ("write", False), ("write_and_replace", False)])
def test_only_what_is_written_to_is_copied(way: str, lends: bool) -> None:
    given = Kept()
    state = ObjectState(given)
    for number in range(4):
        snapshot = state.snapshot()
        assert is_lent(snapshot, given) == (lends and number > 0)
        before = given.residuals["w"].clone()
        getattr(given, way)()
        state.restore(snapshot)
        assert torch.equal(given.residuals["w"], before)
        getattr(given, way)()
        assert torch.equal(given.residuals["w"], before + 1)


def test_a_tensor_without_a_round_is_copied_until_it_is_known() -> None:
    given = Kept()
    state = ObjectState(given)
    assert not any(is_lent(state.snapshot(), given) for _ in range(3))
    given.replace()
    assert is_lent(state.snapshot(), given)


def test_a_tensor_that_is_written_to_once_cannot_be_restored_and_is_told() -> None:
    given = Kept()
    state = ObjectState(given)
    state.snapshot()
    given.replace()
    snapshot = state.snapshot()
    given.write()
    with pytest.raises(RuntimeError, match="Kept: it wrote to a tensor of 'residuals' that it replaced"):
        state.restore(snapshot)
    state.snapshot()
    assert not is_lent(state.snapshot(), given)


def test_counters_are_state_and_options_are_not() -> None:
    given = Kept()
    state = ObjectState(given)
    start = state.copied()
    assert "calls" not in start and "ratio" not in start
    given.replace()
    later = state.copied()
    assert later["calls"] == 1 and "ratio" not in later
    state.restore(start)
    assert given.calls == 0 and given.pairs == {}
    state.restore(later)
    assert given.calls == 1 and torch.equal(given.pairs["w"][0], torch.ones(2))


def test_what_is_made_since_then_is_gone_and_generators_go_back() -> None:
    given = Kept()
    state = ObjectState(given)
    before = state.snapshot()
    first = torch.rand(3, generator=given.generator)
    given.basis = torch.ones(2)
    given.late = torch.ones(2)  # type: ignore[attr-defined]
    state.restore(before)
    assert given.basis is None and not hasattr(given, "late")
    assert torch.equal(torch.rand(3, generator=given.generator), first)


def test_a_saved_state_is_a_copy_and_dictionaries_stay_shared() -> None:
    given, other = Kept(), Kept()
    other.residuals = given.residuals
    states = [ObjectState(given), ObjectState(other)]
    saved = [state.copied() for state in states]
    given.write()
    for state, each in zip(states, saved, strict=True):
        state.restore(each)
    assert given.residuals is other.residuals and torch.equal(given.residuals["w"], torch.arange(3.0))
    given.write()
    assert torch.equal(saved[0]["residuals"]["w"], torch.arange(3.0))


def test_an_object_may_write_to_the_gradient_and_keep_it() -> None:
    class Writes:
        def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Any]:
            tensor += 1
            self.kept = tensor
            return [tensor], None

        def decompress(self, tensors: list[Tensor], ctx: Any) -> Tensor:
            return tensors[0]

    made, gradient = Writes(), torch.zeros(3)
    Custom(made).encode(gradient, "w")
    gradient.fill_(5.0)
    assert torch.equal(made.kept, torch.ones(3))
