# SPDX-License-Identifier: Apache-2.0
"""A gradient that a script keeps by reference stays as it is: later updates are written elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import agreed, batch, digest, on_ranks, seeded, sgd, wrap
from torch import Tensor, nn

MODEL = seeded(lambda: nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32)))
IMAGES = seeded(lambda: nn.Conv2d(8, 16, 3, bias=False).to(memory_format=torch.channels_last))
KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda gradient: gradient,
    "view": lambda gradient: gradient.view(-1),
    "detached": lambda gradient: gradient.detach(),
    "numpy": lambda gradient: torch.from_numpy(gradient.numpy()),
}
OPTIONS: list[dict[str, Any]] = [
    {"compression": "none"},
    {"compression": "topk"},
    {"compression": "dgc"},
    {"compression": "eden-4"},
    {"compression": "powersgd"},
    {"compression": "topk", "exchange": "two-level"},
]


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x, _ = batch(rank, step)
    if isinstance(model, nn.Conv2d):
        x = x.reshape(1, 8, 8, 4).to(memory_format=torch.channels_last)
    return model(x).square().mean()


def trained(rank: int, model: nn.Module, keep: Callable[[Tensor], Tensor] | None, **options: Any) -> str:
    """Train five steps; gradients of each are kept, and must be those of its end when the next one has ended."""
    optimizer = wrap(model, sgd(model), **options)
    kept: list[Tensor] = []
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        copies = [one.clone() for one in kept]
        optimizer.step()
        assert all(map(torch.equal, kept, copies)), f"gradients of step {step - 1} have changed in step {step}"
        kept = [] if keep is None else [keep(p.grad) for p in model.parameters() if p.grad is not None]
    return digest(model)


@pytest.mark.parametrize("keep", KEPT)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options.values()))
def test_a_kept_gradient_stays_as_it_is(options: dict[str, Any], keep: str) -> None:
    """And it changes nothing else: the parameters are those of a training that keeps nothing."""
    with_kept = agreed(on_ranks(2, MODEL, lambda rank, model: trained(rank, model, KEPT[keep], **options)))
    assert with_kept == agreed(on_ranks(2, MODEL, lambda rank, model: trained(rank, model, None, **options)))


@pytest.mark.parametrize("compression", ["none", "topk", "eden-4"])
def test_a_kept_gradient_that_is_not_in_c_order_stays_as_it_is(compression: str) -> None:
    def body(rank: int, model: nn.Module) -> str:
        return trained(rank, model, KEPT["itself"], compression=compression)

    agreed(on_ranks(2, IMAGES, body))


def test_a_gradient_is_kept_of_one_parameter_on_one_rank_while_others_accumulate() -> None:
    """What other parameters still have in ``p.grad`` goes on from its value, wherever updates are written now."""

    def body(rank: int, model: nn.Sequential, keeps: bool) -> str:
        optimizer = wrap(model, sgd(model), compression="none")
        kept: list[Tensor] = []
        for step in range(4):
            loss_of(model, rank, step).backward()
            optimizer.step()
            if keeps and rank == 0:
                assert model[0].weight.grad is not None
                kept.append(model[0].weight.grad)
            model[0].weight.grad = None  # the others go on
        assert len({one.data_ptr() for one in kept}) == len(kept)
        return digest(model)

    assert agreed(on_ranks(2, MODEL, lambda rank, model: body(rank, model, True))) == agreed(
        on_ranks(2, MODEL, lambda rank, model: body(rank, model, False))
    )


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("compression", ["none", "topk", "powersgd"])
def test_where_nothing_is_kept_the_memory_stays(compression: str, set_to_none: bool) -> None:
    """A step would cost more with other memory."""

    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model, sgd(model), compression=compression)
        places = set()
        for step in range(6):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss_of(model, rank, step).backward()
            optimizer.step()
            places.add(tuple(p.grad.data_ptr() for p in model.parameters() if p.grad is not None))
        assert len(places) == 1

    on_ranks(2, MODEL, body)
