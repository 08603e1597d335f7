# SPDX-License-Identifier: Apache-2.0
"""What a script sets on the wrapper reaches the optimizer, as with Horovod, where the wrapper is the optimizer."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import digest, loss_of, mlp, on_ranks, seeded, sgd, train, wrap
from torch import nn

MODEL = seeded(mlp)


class Scaled(torch.optim.SGD):
    """An SGD that reads an attribute of its own in each step."""

    scale = 1.0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(self.scale * getattr(self, "factor", 1.0))
        return super().step(closure)


@pytest.mark.parametrize("name", ["scale", "factor"])
def test_an_attribute_that_the_step_reads_has_its_effect(name: str) -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model, Scaled(model.parameters(), lr=0.1), compression="none")
        train(model, optimizer, rank, range(1))
        before = digest(model)
        setattr(optimizer, name, 0.0)
        assert getattr(optimizer, name) == getattr(optimizer.optimizer, name) == 0.0
        train(model, optimizer, rank, range(1, 2))
        assert digest(model) == before
        delattr(optimizer, name)
        train(model, optimizer, rank, range(2, 3))
        assert digest(model) != before

    on_ranks(2, MODEL, body)


def test_of_several_each_gets_it() -> None:
    def body(rank: int, model: nn.Module) -> None:
        first, *others = model.parameters()
        pair: Any = [Scaled([first], lr=0.1), Scaled(others, lr=0.1)]
        optimizer = wrap(model, pair, compression="none")
        before = digest(model)
        optimizer.scale = 0.0
        train(model, optimizer, rank, range(1))
        assert [each.scale for each in pair] == [0.0, 0.0] and digest(model) == before
        with pytest.raises(AttributeError, match="param_groups of one of them can be set: there are several"):
            optimizer.param_groups = []

    on_ranks(1, MODEL, body)


def test_state_groups_and_defaults_can_be_set() -> None:
    def body(rank: int, model: nn.Module) -> None:
        twin = copy.deepcopy(model)
        plain, optimizer = sgd(twin), wrap(model, compression="none")
        for its_model, its_optimizer in ((twin, plain), (model, optimizer)):
            train(its_model, its_optimizer, rank, range(2))
            its_optimizer.state = defaultdict(dict)  # the momentum is forgotten
            its_optimizer.param_groups = [{**group, "lr": 0.01} for group in its_optimizer.param_groups]
            its_optimizer.defaults = {**its_optimizer.defaults, "lr": 0.01}
            train(its_model, its_optimizer, rank, range(2, 4))
        assert digest(model) == digest(twin)
        assert optimizer.optimizer.defaults["lr"] == 0.01 and optimizer.optimizer.state is optimizer.state

    on_ranks(1, MODEL, body)


def test_what_schedulers_and_the_library_set_stays_on_the_wrapper() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # it replaces optimizer.step
        optimizer.zero_grad()
        loss_of(model, rank, 0).backward()
        optimizer.step()
        assert "step" in vars(optimizer) and "step" not in vars(optimizer.optimizer)
        assert optimizer.stats()["steps"] == 1
        with pytest.raises(AttributeError):
            del optimizer.nothing

    on_ranks(1, MODEL, body)
