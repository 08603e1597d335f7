# SPDX-License-Identifier: Apache-2.0
"""``compression="auto"`` takes no 2 bits for a model in which zeros would take one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import agreed, on_ranks
from support.quantiser_world import LOOK, MODEL, TRIAL, World, trained, wrapped
from torch import Tensor, nn

from agmerge.exchanges.message.scaled import ZeroCount
from agmerge.planning import choice
from agmerge.planning.coding import FEW_BITS, MIXED, loses_by_zeros
from agmerge.planning.replanner import FIRST

NEAR = 1e6  # seconds to start an exchange, beside which bytes do not count
Where = Callable[[Tensor], Tensor]  # the part of a gradient that is zero


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    made.install(monkeypatch)
    return made


def half_of_columns(gradient: Tensor) -> Tensor:
    """Inputs that are always zero, in a layer with half of the quantised coordinates."""
    return gradient[:, : gradient.shape[1] // 2]


def whole_blocks(gradient: Tensor) -> Tensor:
    """Rows of an embedding that no sample uses: 256 coordinates each, or some rows together."""
    return gradient.view(-1, 256)[::2]


def one_column(gradient: Tensor) -> Tensor:
    """Too few zeros for a block in eight: all of them are in the first block."""
    return gradient[:1, :1]


def train(where: Where | None, steps: int, begin: int = 0, size: int = 2, **options: Any) -> tuple[list[str], str]:
    """Return in what gradients travel after each step, and the reason; zeros begin after ``begin`` steps."""

    def body(rank: int, model: nn.Module) -> tuple[list[str], str]:
        seen = [0]

        def masked(gradient: Tensor) -> Tensor:
            gradient, seen[0] = gradient.clone(), seen[0] + 1
            if where is not None and seen[0] > begin:
                where(gradient).zero_()
            return gradient

        model[0].weight.register_hook(masked)
        optimizer = wrapped(model, **options)
        return trained(rank, model, optimizer, range(steps))[0], optimizer.stats()["quantiser_why"]

    return agreed(on_ranks(size, MODEL, body))


def name_of(value: object) -> str:
    """Return the name of a case: of a function its own, which is the same in every process."""
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize("size", [2, 3])
def test_dead_inputs_leave_out_2_bits_though_these_are_fastest(size: int, world: World) -> None:
    names, why = train(half_of_columns, FIRST + 1, size=size)
    assert names == ["eden-4"] * (FIRST + 1)
    assert why.endswith("; eden-2 left out: 50% of coordinates lie in blocks that mix zeros and other values")


@pytest.mark.parametrize("where", [None, whole_blocks, one_column], ids=name_of)
def test_without_zeros_beside_other_values_2_bits_are_taken(where: Where | None, world: World) -> None:
    names, why = train(where, FIRST + 1)
    assert names[-1] == "eden-2" and "left out" not in why


@pytest.mark.parametrize(("where", "name"), [(half_of_columns, "int8"), (None, "eden-2")], ids=name_of)
def test_zeros_are_of_gradients_and_not_of_what_8_bits_round_to_zero(
    where: Where | None, name: str, world: World
) -> None:
    names, _ = train(where, FIRST + 1, compression=["int8", "eden-2"])
    assert names[:FIRST] == ["int8"] * (FIRST - 1) + [name]


def test_where_nothing_else_may_be_taken_they_are_kept(world: World) -> None:
    names, why = train(half_of_columns, FIRST + 1, compression=["eden-2", "eden-1"])
    assert {"eden-1", "eden-2"} >= set(names) and "left out" not in why


def test_weights_that_are_pruned_later_end_the_2_bits_at_the_next_look(world: World) -> None:
    world.dense, world.seconds = 1e3, {"int8": 3.0, "eden-4": 2.0, "eden-2": 1.0}
    begin = FIRST + TRIAL + 2 * LOOK
    names, why = train(half_of_columns, begin + 2 * LOOK + TRIAL, begin=begin)
    assert set(names[FIRST + TRIAL : begin]) == {"eden-2"} and "eden-2" not in names[begin + LOOK + 2 :]
    assert names[-1] == "eden-4" and "eden-2 left out: 50%" in why


def test_zeros_are_counted_too_while_gradients_go_dense(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "AGAIN", 3 * LOOK)

    def tried(where: Where | None) -> list[list[str]]:
        world.tried, world.start, world.dense, world.has_changed = [], 0.0, 1e-9, False

        def later(gradient: Tensor) -> Tensor:  # not at a look: ranks are some lines apart
            world.start, world.dense, world.has_changed = NEAR, 1.0, True
            return gradient[:0] if where is None else where(gradient)

        sent, _ = train(later, 5 * LOOK + 3, begin=FIRST + 3)
        assert set(sent[FIRST - 1 : 3 * LOOK]) == {"none"}
        return [names for names in world.tried if len(set(names)) > 1]  # others are of merge buffers alone

    assert tried(None) == [["eden-4", "eden-2", "none"]]
    assert tried(half_of_columns) == [["int8", "eden-4", "none"]]


def test_a_last_block_is_mixed_by_its_own_zeros_alone() -> None:
    count = ZeroCount()
    count.take(torch.ones(300), 300, 256)  # what fills it up is no coordinate
    count.take(None, 100, 64)
    assert count.counts() == (0, 400)
    values = torch.ones(300)
    values[-1] = 0
    count.take(values, 300, 256)
    assert count.counts() == (44, 700)


def test_the_rule_is_for_2_bits_or_fewer_that_keep_zeros_in_a_mask() -> None:
    assert (FEW_BITS, MIXED) == (2, 1 / 8)
    names = ("eden-1", "eden-2", "eden-3", "eden-4", "int8", "terngrad")
    assert [name for name in names if loses_by_zeros(name)] == ["eden-1", "eden-2"]
