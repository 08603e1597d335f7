# SPDX-License-Identifier: Apache-2.0
"""Hooks around a step of a subclass that calls ``super().step()``, which torch may run twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import agreed, backward, digest, mlp, on_ranks, seeded
from torch import nn

import agmerge
from agmerge.engine.step_hooks import OutermostStep

MODEL = seeded(mlp)


class Derived(torch.optim.SGD):
    """Call the step of the class that it derives from, as schedules and clippings of others do."""

    fails = False

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        result = super().step(closure)
        if self.fails:
            raise RuntimeError("a bad step")
        return result


def made(model: nn.Module) -> Derived:
    """The optimizer, in a process in which torch runs hooks around the steps of both classes."""
    torch.optim.SGD(model.parameters(), lr=0.1)
    return Derived(model.parameters(), lr=0.1, momentum=0.9)


def test_only_the_outer_call_is_outermost() -> None:
    optimizer, step, seen = made(seeded(mlp)), OutermostStep(), []
    optimizer.register_step_pre_hook(lambda *_: seen.append(("begins", step.begins())))
    optimizer.register_step_post_hook(lambda *_: seen.append(("ends", step.ends())))
    once = [("begins", True), ("begins", False), ("ends", False), ("ends", True)]
    optimizer.step()
    assert seen == once
    optimizer.fails = True
    with pytest.raises(RuntimeError, match="a bad step"):
        optimizer.step()
    optimizer.fails = False
    seen.clear()
    optimizer.step()
    assert seen == once  # what has raised is not taken for a step that is under way


@pytest.mark.parametrize("every", [1, 3])
def test_a_step_is_exchanged_once(every: int) -> None:
    """The parameters of a plain SGD with the same options, to the bit, and as many steps."""

    def body(rank: int, model: nn.Module, kind: Any) -> tuple[int, str]:
        optimizer = kind(model)
        with agmerge.LocalSync(model, optimizer, every=every, exchange="sparse") as sync:
            for step in range(6):
                optimizer.zero_grad()
                backward(model, rank, step)
                optimizer.step()
            with sync.shared():
                return sync.stats()["steps"], digest(model)

    def plain(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    derived = agreed(on_ranks(2, MODEL, lambda rank, model: body(rank, model, made)))
    assert derived == agreed(on_ranks(2, MODEL, lambda rank, model: body(rank, model, plain)))
