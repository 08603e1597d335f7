# SPDX-License-Identifier: Apache-2.0
"""What is kept survives a restart, another rank and another compressor: to the bit, where nothing differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import agreed
from support.low_rank_steps import (
    LEFT,
    MATRICES,
    NAMES,
    RIGHT,
    SHAPES,
    Step,
    distance,
    drawn,
    made,
    mean,
    opened,
)
from torch import Tensor

from agmerge import testing
from agmerge.step.gradient_exchange import GradientExchange

both = pytest.mark.parametrize("name", NAMES)


def single(rank: int, step: int) -> dict[str, Tensor]:
    return drawn(rank, step, torch.float32)


def new(name: str, **options: Any) -> GradientExchange:
    return opened({tensor: torch.zeros(shape) for tensor, shape in SHAPES.items()}, name, **options)


# -- restarts ---------------------------------------------------------------------------------------------------------


@both
def test_bases_of_another_rank_are_drawn_anew_and_residuals_stay(name: str) -> None:
    def body(rank: int) -> tuple[Step, Step]:
        before = new(name, rank=4)
        seen = [made(before, single(rank, step)) for step in range(2)]
        after = new(name, rank=2)
        after.restore(before.agreed.current.copied(), before.agreed.steps, None)
        return seen[-1], made(after, single(rank, 2))

    seen = testing.run(2, body)
    for tensor in MATRICES:
        there_was = mean([old.residuals[tensor] + new_one.gradients[tensor] for old, new_one in seen])
        rest = mean([new_one.residuals[tensor] for _, new_one in seen])
        assert distance(seen[0][1].update(tensor) + rest, there_was) < 1e-6
        assert len(seen[0][1].bases[tensor][1]) == 2


# -- other compressors ------------------------------------------------------------------------------------------------


@both
def test_sides_are_kept_by_kind_and_name(name: str) -> None:
    """What a checkpoint has of them: one basis a tensor."""

    def body(rank: int) -> dict[tuple[str, str], tuple[int, ...]]:
        exchange = new(name, rank=2)
        for step in range(2):
            made(exchange, single(rank, step))
        return {
            key: tuple(tensor.shape) for key, tensor in exchange.agreed.current.tensors.items() if key[0] != "residual"
        }

    shapes = agreed(testing.run(2, body))
    assert {tensor for _, tensor in shapes} == set(MATRICES) and len(shapes) == len(MATRICES)
    assert {kind for kind, _ in shapes} <= {LEFT, RIGHT}
