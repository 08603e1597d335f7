# SPDX-License-Identifier: Apache-2.0
"""The optimizer is a black box: any works, and its state is that of a run in one process with the same parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support import agreed, backward, digest, mlp, on_ranks, seeded
from support.updates import assert_common, base_of, updating
from torch import nn

WITHOUT = {"Optimizer", "LBFGS", "SparseAdam", "Muon"}  # Muon: below, it takes matrices alone
CLASSES = [
    kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in WITHOUT
]
FUSED = [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad]  # on the CPU


def matrices() -> nn.Sequential:
    """Return a model of matrices alone."""
    layers = [nn.Linear(32, 48, bias=False), nn.Tanh(), nn.Linear(48, 32, bias=False), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(32, 10, bias=False))


def makers() -> dict[str, tuple[Callable[[], nn.Module], Callable[[Any], torch.optim.Optimizer]]]:
    """Return models and optimizers of them, by name."""
    made: dict[str, Any] = {}
    for kind in CLASSES:
        decay = {} if kind in (torch.optim.Rprop,) else {"weight_decay": 0.01}
        made[kind.__name__] = mlp, partial(kind, **decay)
        for foreach in (False, True):
            made[f"{kind.__name__}, foreach={foreach}"] = mlp, partial(kind, foreach=foreach)
    for kind in FUSED:
        made[f"{kind.__name__}, fused"] = mlp, partial(kind, fused=True)
    made["SGD, nesterov"] = mlp, partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
    made["Adam, amsgrad"] = mlp, partial(torch.optim.Adam, amsgrad=True)
    made["RMSprop, centered"] = mlp, partial(torch.optim.RMSprop, centered=True, momentum=0.5)
    if hasattr(torch.optim, "Muon"):
        made["Muon"] = matrices, partial(torch.optim.Muon, lr=0.01)
    return made


def of_state(optimizer: torch.optim.Optimizer) -> str:
    """Return the bits of what an optimizer keeps, parameter by parameter."""
    states = optimizer.state_dict()["state"]
    tensors = [(place, key, value) for place in sorted(states) for key, value in states[place].items()]
    bits = digest(value.reshape(-1) for *_, value in tensors if isinstance(value, torch.Tensor))
    return bits + str([(place, key) for place, key, _ in tensors])


@pytest.mark.parametrize("options", [{}, {"carry": "hold", "every": 2}], ids=["apply", "hold, every 2"])
@pytest.mark.parametrize("name", makers())
def test_an_optimizer_does_what_it_does_alone(name: str, options: dict[str, Any]) -> None:
    """Replayed: beside each step, a twin gets the same parameters and gradients, and steps by itself."""
    build, make = makers()[name]

    def body(rank: int, model: nn.Module) -> str:
        inner, twin = make(model.parameters()), copy.deepcopy(model)
        alone = make(twin.parameters())
        optimizer = updating(model, inner, density=0.05, exchange="sparse", **options)
        stepped: list[str] = []
        inner.register_step_post_hook(lambda *_: stepped.append(digest(model)))
        for step in range(4):
            optimizer.zero_grad()
            backward(model, rank, step)
            for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                theirs.data.copy_(ours.data)
                theirs.grad = ours.grad.clone()
            alone.step()
            optimizer.step()
            assert stepped[-1] == digest(twin)
        assert of_state(inner) == of_state(alone) and of_state(inner) == of_state(optimizer)
        bits = digest(base_of(optimizer).values())
        assert_common(optimizer)
        return bits

    model = seeded(build)
    base = agreed(on_ranks(2, model, body))
    assert base != digest(model)
