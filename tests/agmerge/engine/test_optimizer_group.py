# SPDX-License-Identifier: Apache-2.0
"""One optimizer that stands for several, as a framework has it that steps it without a wrapper."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from support import backward, digest
from support.several_optimizers import MODEL, MUON, moments, pair
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from agmerge.engine.optimizer_group import inner_of
from agmerge.tensors.parameters import ParameterTable, optimizers_of


def grouped(model: nn.Module) -> Any:
    """What stands for Muon and AdamW."""
    inner: Any = pair(model)
    return inner_of(inner, model.named_parameters())


def steps(model: nn.Module, optimizers: list[Any], count: int = 3) -> tuple[str, str]:
    """Bits after some steps of each of these."""
    for step in range(count):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(model, 0, step)
        for optimizer in optimizers:
            optimizer.step()
    kept = [each for optimizer in optimizers for each in optimizers_of(optimizer)]
    return digest(model), moments(kept)


def test_it_steps_as_they_do() -> None:
    ours, theirs = copy.deepcopy(MODEL), copy.deepcopy(MODEL)
    assert steps(ours, [grouped(ours)]) == steps(theirs, pair(theirs))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_steps_on(how: str) -> None:
    model = copy.deepcopy(MODEL)
    group = grouped(model)
    steps(model, [group])
    both = (model, group)
    other, twin = copy.deepcopy(both) if how == "deepcopy" else pickle.loads(pickle.dumps(both))
    assert type(twin).__name__ == f"{MUON.__name__} and AdamW" and twin.param_groups[0]["params"][0] is other[0].weight
    assert steps(other, [twin]) == steps(model, [group])


def test_a_closure_is_called_once_before_all() -> None:
    model, calls = copy.deepcopy(MODEL), []
    group = grouped(model)

    def closure() -> float:
        assert torch.is_grad_enabled() and not calls
        group.zero_grad()
        backward(model, 0, 0)
        calls.append(digest(model))
        return 1.5

    with torch.no_grad():
        assert group.step(closure) == 1.5
    twin = copy.deepcopy(MODEL)
    assert calls == [digest(MODEL)] and digest(model) == steps(twin, pair(twin), 1)[0]


def test_a_hook_may_give_another_closure() -> None:
    model = copy.deepcopy(MODEL)
    group = grouped(model)
    backward(model, 0, 0)
    group.register_step_pre_hook(lambda one, args, kwargs: ((one,), {"closure": lambda: 2.5}))
    assert group.step() == 2.5
    group.register_step_pre_hook(lambda one, args, kwargs: ((one, lambda: 3.5), {}))
    assert group.step() == 3.5


def test_what_a_framework_does_with_an_optimizer() -> None:
    """It places the state by loading it again, schedules, and asks what the optimizer can."""
    model = copy.deepcopy(MODEL)
    group = grouped(model)
    steps(model, [group], 1)
    kept = moments(group.optimizers)
    group.load_state_dict(copy.deepcopy(group.state_dict()))
    assert moments(group.optimizers) == kept and list(group.state_dict()) == ["optimizers"]
    LambdaLR(group, lambda epoch: 0.5)
    assert [each.param_groups[0]["lr"] for each in group.optimizers] == [0.01, 0.005]
    assert not getattr(group, "_step_supports_amp_scaling", False) and not hasattr(group, "train")
    table = ParameterTable(group, model.named_parameters())
    assert [len(parameters) for parameters in table.by_optimizer()] == [3, 3] and table.optimizer is group
    with pytest.raises(ValueError, match="Choose one, on every rank at the same step:"):
        group.add_param_group({"params": []})
