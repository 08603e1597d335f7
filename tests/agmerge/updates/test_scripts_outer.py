# SPDX-License-Identifier: Apache-2.0
"""``LocalSync(outer_optimizer=)``: it is the script's object that steps, as with torchft."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import agreed, digest, loss_of, mlp, on_ranks, same_bits, seeded, sgd
from torch import Tensor, nn

import agmerge

MODEL, EVERY, STEPS = seeded(mlp), 2, 8
WHOLE: dict[str, Any] = {"every": EVERY, "compression": "none"}


def nesterov(model: nn.Module, lr: float = 0.7) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)


def local_steps(model: nn.Module, inner: Any, rank: int, steps: range) -> None:
    for step in steps:
        inner.zero_grad()
        loss_of(model, rank, step).backward()
        inner.step()


def trained(rank: int, model: nn.Module, rates: bool) -> tuple[str, Any]:
    """Train; with ``rates`` a scheduler changes the outer rate after every exchange."""
    inner, outer = sgd(model, lr=0.05), nesterov(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(outer, 0.5)
    with agmerge.LocalSync(model, inner, outer_optimizer=outer, **WHOLE):
        for start in range(0, STEPS, EVERY):
            local_steps(model, inner, rank, range(start, start + EVERY))
            if rates:
                scheduler.step()
    return digest(model), outer


def reference(size: int, rates: bool) -> nn.Module:
    """DiLoCo as its paper has it: workers step by themselves, then the outer optimizer with the mean of their ways."""
    shared = copy.deepcopy(MODEL)
    outer = nesterov(shared)
    workers = [copy.deepcopy(MODEL) for _ in range(size)]
    inners = [sgd(worker, lr=0.05) for worker in workers]
    for start in range(0, STEPS, EVERY):
        for rank, (worker, inner) in enumerate(zip(workers, inners, strict=True)):
            local_steps(worker, inner, rank, range(start, start + EVERY))
        for parameter, *own in zip(shared.parameters(), *(worker.parameters() for worker in workers), strict=True):
            parameter.grad = parameter.detach() - torch.stack([one.detach() for one in own]).mean(0)
        outer.step()
        for worker in workers:
            worker.load_state_dict(shared.state_dict())
        for group in outer.param_groups if rates else ():
            group["lr"] *= 0.5
    return shared


@pytest.mark.parametrize("rates", [False, True], ids=["one rate", "a scheduler"])
def test_its_rate_its_scheduler_and_its_state_are_those_that_count(rates: bool) -> None:
    def body(rank: int, model: nn.Module) -> tuple[str, nn.Module]:
        found, outer = trained(rank, model, rates)
        assert len(outer.state) == len(list(model.parameters()))  # torchft's own assertion
        return found, model

    results = on_ranks(2, MODEL, body)
    agreed([found for found, _ in results])
    for own, other in zip(results[0][1].parameters(), reference(2, rates).parameters(), strict=True):
        torch.testing.assert_close(own, other)


def test_groups_with_rates_of_their_own() -> None:
    def body(rank: int, model: nn.Module) -> bool:
        first, *others = model.parameters()
        inner = sgd(model, lr=0.05)
        outer = torch.optim.SGD([{"params": [first], "lr": 0.0}, {"params": others}], lr=1.0)
        before = first.detach().clone()
        with agmerge.LocalSync(model, inner, outer_optimizer=outer, **WHOLE) as sync:
            local_steps(model, inner, rank, range(STEPS))
            sync.consolidate()
        return same_bits(first.detach(), before)

    assert on_ranks(2, MODEL, body) == [True, True]


def test_parameters_and_gradients_are_the_scripts_again_behind_it() -> None:
    def body(rank: int, model: nn.Module) -> None:
        inner, outer = sgd(model, lr=0.05), nesterov(model)
        places = [p.data_ptr() for p in model.parameters()]
        with agmerge.LocalSync(model, inner, outer_optimizer=outer, **WHOLE):
            inner.zero_grad()
            loss_of(model, rank, 0).backward()
            inner.step()
            loss_of(model, rank, 1).backward()
            gradients: list[Tensor] = [p.grad for p in model.parameters()]  # type: ignore[misc]
            inner.step()
            assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
        assert [p.data_ptr() for p in model.parameters()] == places

    on_ranks(2, MODEL, body)


def test_a_checkpoint_has_its_momentum() -> None:
    def body(rank: int, model: nn.Module) -> None:
        again = copy.deepcopy(model)
        inner, outer = sgd(model, lr=0.05), nesterov(model)
        with agmerge.LocalSync(model, inner, outer_optimizer=outer, **WHOLE) as sync:
            local_steps(model, inner, rank, range(4))
            state, weights = copy.deepcopy(sync.state_dict()), copy.deepcopy(model.state_dict())
            local_steps(model, inner, rank, range(4, STEPS))
        other_inner, other = sgd(again, lr=0.05), nesterov(again)
        with agmerge.LocalSync(again, other_inner, outer_optimizer=other, **WHOLE) as sync:
            again.load_state_dict(weights)
            sync.load_state_dict(state)
            local_steps(again, other_inner, rank, range(4, STEPS))
        assert digest(again) == digest(model)
        for own, expected in zip(other.state.values(), outer.state.values(), strict=True):
            assert same_bits(own["momentum_buffer"], expected["momentum_buffer"])

    on_ranks(2, MODEL, body)


def test_bfloat16_parameters_step_in_float32() -> None:
    def body(rank: int, model: nn.Module) -> str:
        inner, outer = sgd(model, lr=0.05), nesterov(model)
        with agmerge.LocalSync(model, inner, outer_optimizer=outer, **WHOLE) as sync:
            local_steps(model, inner, rank, range(STEPS))
            sync.consolidate()
        assert all(p.dtype == torch.bfloat16 for p in model.parameters())
        assert all(entry["momentum_buffer"].dtype == torch.float32 for entry in outer.state.values())
        return digest(model)

    agreed(on_ranks(2, seeded(mlp).to(torch.bfloat16), body))


def test_an_outer_optimizer_of_other_parameters_is_refused() -> None:
    def body(rank: int, model: nn.Module) -> None:
        with pytest.raises(ValueError, match=r"outer_optimizer does not have the model's parameters '0\.weight'"):
            agmerge.LocalSync(model, sgd(model), outer_optimizer=nesterov(copy.deepcopy(model)))
        with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer, got Nesterov"):
            agmerge.LocalSync(model, sgd(model), outer_optimizer=agmerge.Nesterov())  # type: ignore[arg-type]

    on_ranks(1, MODEL, body)
