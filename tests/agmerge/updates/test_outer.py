# SPDX-License-Identifier: Apache-2.0
"""Outer steps: Nesterov's momentum as DiLoCo has it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import agmerge
from agmerge.updates.outer_steps import NesterovStep


def stepped(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, ways: list[torch.Tensor | None]) -> torch.Tensor:
    for way in ways:
        parameter.grad = way
        optimizer.step()
    return parameter


WAYS = [torch.tensor([1.0, -2.0, 0.5]), torch.tensor([0.25, 0.0, -1.0]), torch.tensor([0.0, 3.0, 1.0])]


@pytest.mark.parametrize("lr, momentum", [(0.7, 0.9), (1.0, 0.0), (0.3, 0.5)])
def test_it_is_the_recurrence(lr: float, momentum: float) -> None:
    """Rounded product by product: to the bit what numpy makes of it in float32."""
    parameter = torch.tensor([0.1, 0.2, 0.3])
    shared, velocity = parameter.numpy().copy(), np.zeros(3, np.float32)
    rate, weight = np.float32(lr), np.float32(momentum)
    found = stepped(agmerge.Nesterov(lr, momentum)([parameter]), parameter, WAYS)
    for way in WAYS:
        velocity = velocity * weight + way.numpy()
        shared = shared - (velocity * weight + way.numpy()) * rate
    np.testing.assert_array_equal(found.numpy(), shared)


def test_it_is_the_optimizer_that_scripts_give_to_torchft() -> None:
    ours, theirs = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.1, 0.2, 0.3])
    stepped(agmerge.Nesterov()([ours]), ours, WAYS)
    stepped(torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True), theirs, WAYS)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_without_a_way_a_parameter_and_its_momentum_stay() -> None:
    """Ask for a fragment that is not due."""
    parameter, twin = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.1, 0.2, 0.3])
    first, second = agmerge.Nesterov()([parameter]), agmerge.Nesterov()([twin])
    stepped(first, parameter, [WAYS[0], None, WAYS[1], None])
    stepped(second, twin, WAYS[:2])
    assert torch.equal(parameter, twin)
    other = torch.ones(2)
    optimizer = agmerge.Nesterov()([other])
    stepped(optimizer, other, [None])
    assert torch.equal(other, torch.ones(2)) and not optimizer.state


def test_its_state_can_be_saved() -> None:
    parameter = torch.tensor([0.1, 0.2, 0.3])
    optimizer = agmerge.Nesterov()([parameter])
    stepped(optimizer, parameter, WAYS[:2])
    twin, state = parameter.clone(), copy.deepcopy(optimizer.state_dict())
    resumed = agmerge.Nesterov()([twin])
    resumed.load_state_dict(state)
    assert torch.equal(stepped(optimizer, parameter, WAYS[2:]), stepped(resumed, twin, WAYS[2:]))
    assert isinstance(resumed, NesterovStep)


@pytest.mark.parametrize("options", [{"lr": 0.0}, {"lr": -1.0}, {"momentum": 1.0}, {"momentum": -0.1}])
def test_values_without_meaning_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"Nesterov: {next(iter(options))} must"):
        agmerge.Nesterov(**options)
