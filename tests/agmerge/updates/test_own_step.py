# SPDX-License-Identifier: Apache-2.0
"""Test a step with this worker's own gradients: what is not finite is seen before the optimizer sees it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import digest, loss_of, mlp, seeded
from torch import nn

from agmerge.tensors.parameters import ParameterTable
from agmerge.updates.local_replica import OwnStep, not_finite, own_step


class Wrapper:
    """Stand for the optimizer that a GradScaler knows."""


def made(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, ParameterTable]:
    model = seeded(mlp)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
    return model, inner, ParameterTable(inner, model.named_parameters())


def test_it_steps_and_returns_what_the_optimizer_does() -> None:
    model, inner, members = made()
    before = digest(model)
    loss_of(model, 0, 0).backward()
    assert own_step(members, Wrapper(), None) == OwnStep(None) and digest(model) != before
    assert own_step(members, Wrapper(), lambda: 5.0) == OwnStep(5.0)


def test_a_closure_is_called_once_with_gradients_recorded_before_they_are_looked_at() -> None:
    model, inner, members = made()
    calls = []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        inner.zero_grad()
        loss = loss_of(model, 0, 1)
        (loss * torch.nan).backward()
        return loss

    with torch.no_grad():
        done = own_step(members, Wrapper(), closure)
    assert calls == [True] and not done.stepped and set(done.bad) == {name for name, _ in model.named_parameters()}
    assert done.result is not None and done.result.isfinite() and not inner.state


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_number_that_is_not_finite_is_a_step_left_out(bad: float) -> None:
    model, inner, members = made()
    loss_of(model, 0, 0).backward()
    model[2].bias.grad[7] = bad
    before = digest(model)
    assert own_step(members, Wrapper(), None) == OwnStep(stepped=False, bad=("2.bias",))
    assert digest(model) == before and not inner.state


def test_gradients_of_any_kind_are_looked_at() -> None:
    """Sparse ones by their values; none, and of no elements, are finite; complex, and of 16 bits."""
    tensors = {
        "sparse": torch.zeros(4, 2),
        "none": torch.zeros(2),
        "empty": torch.zeros(0, 3),
        "half": torch.zeros(3, dtype=torch.bfloat16),
        "complex": torch.zeros(3, dtype=torch.complex64),
        "good": torch.zeros(3),
    }
    parameters = {name: nn.Parameter(tensor) for name, tensor in tensors.items()}
    parameters["sparse"].grad = torch.sparse_coo_tensor([[1, 1]], [[1.0, 2.0], [torch.nan, 0.0]], (4, 2))
    parameters["empty"].grad = torch.zeros(0, 3)
    parameters["half"].grad = torch.tensor([1, torch.inf, 0], dtype=torch.bfloat16)
    parameters["complex"].grad = torch.tensor([0, complex(0, float("nan")), 0])
    parameters["good"].grad = torch.full((3,), 3e38)
    inner = torch.optim.SGD(parameters.values(), lr=0.1)
    assert not_finite(ParameterTable(inner, parameters.items())) == ("sparse", "half", "complex")


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scale", [None, 2.0**10])
def test_scaled_gradients_are_unscaled_and_an_overflow_is_left_out(scale: float | None, fused: bool) -> None:
    """Step as ``GradScaler.step()`` has it, to the bit; ``scale`` None: the script has unscaled them."""
    options = {"fused": fused or None, "eps": 1.0}  # with a small one a first step is the same for any scale
    model, inner, members = made(**options)
    plain, expected, _ = made(**options)
    for one in (model, plain):
        loss_of(one, 0, 0).backward()
    expected.step()
    wrapper = Wrapper()
    wrapper.found_inf = torch.tensor(0.0)
    wrapper.grad_scale = None if scale is None else torch.tensor(scale)
    for parameter in model.parameters():
        parameter.grad.mul_(scale or 1.0)
    done = own_step(members, wrapper, None)
    assert done.stepped and done.scaled and digest(model) == digest(plain)
    wrapper.found_inf = torch.tensor(1.0)
    before = digest(model)
    done = own_step(members, wrapper, None)
    assert done.scaled and digest(model) == before and not done.stepped
    assert not hasattr(inner, "found_inf") and not hasattr(inner, "grad_scale")
