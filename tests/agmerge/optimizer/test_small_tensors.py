# SPDX-License-Identifier: Apache-2.0
"""Compare models of small tensors alone, of which nothing is selected, with a training in one process.

Random programs of use, freezing, accumulation, skipped steps, learning rates and checkpoints, against an SGD of
torch's own that has the gradients of all ranks.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass

import pytest
import torch
from support import agreed, digest, on_ranks, seeded
from torch import Tensor, nn

import agmerge

SIZE, STEPS, RANKS = 12, 14, 2
LAYERS = "abc"


class Small(nn.Module):
    """Layers of less than 1024 elements, of which a forward uses those that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(SIZE, SIZE) for _ in LAYERS)
        self.norm = nn.LayerNorm(SIZE)

    def loss(self, rank: int, step: int, micro: int, use: str) -> Tensor:
        x, y = torch.randn(2, 5, SIZE, generator=torch.Generator().manual_seed(1000 * step + 10 * rank + micro))
        for name in use:
            x = x + torch.tanh(getattr(self, name)(x))
        return (self.norm(x) - y).square().mean()


MODEL = seeded(Small)


@dataclass(frozen=True)
class Step:
    """Say what happens in a step. ``uses``: of each rank."""

    uses: tuple[str, ...]
    before: str  # "freeze", "unfreeze", "lr", "checkpoint" or nothing
    passes: int
    skipped: bool


def program(seed: int) -> list[Step]:
    source = random.Random(seed)
    return [
        Step(
            tuple("".join(name for name in LAYERS if source.random() < 0.6) for _ in range(RANKS)),
            source.choice(["freeze", "unfreeze", "lr", "checkpoint", "", "", ""]),
            source.choice([1, 1, 1, 1, 2]),
            source.random() < 0.15,
        )
        for _ in range(STEPS)
    ]


def sgd(model: Small, seed: int) -> torch.optim.SGD:
    momentum, nesterov = [(0.0, False), (0.9, False), (0.9, True)][seed % 3]
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum, nesterov=nesterov)


def change(model: Small, optimizer: torch.optim.Optimizer, step: Step) -> None:
    """Freeze, unfreeze or slow down, if the step begins with that."""
    if step.before in ("freeze", "unfreeze"):
        model.b.requires_grad_(step.before == "unfreeze")
    for group in optimizer.param_groups if step.before == "lr" else ():
        group["lr"] *= 0.7


def in_one_process(seed: int) -> Small:
    model = copy.deepcopy(MODEL)
    optimizer = sgd(model, seed)
    for number, step in enumerate(program(seed)):
        change(model, optimizer, step)
        optimizer.zero_grad()
        for rank in range(RANKS):
            for micro in range(step.passes):
                (model.loss(rank, number, micro, step.uses[rank]) / RANKS).backward()
        if not step.skipped:
            optimizer.step()
    return model


def on_all_ranks(seed: int, compression: str, wire: str) -> Small:
    def wrapped(model: Small) -> agmerge.DistributedOptimizer:
        parameters = model.named_parameters()
        return agmerge.DistributedOptimizer(sgd(model, seed), parameters, compression=compression, wire=wire)

    def body(rank: int, model: Small) -> Small:
        optimizer = wrapped(model)
        for number, step in enumerate(program(seed)):
            change(model, optimizer, step)
            if step.before == "checkpoint":
                state = copy.deepcopy(optimizer.state_dict())
                optimizer.close()
                optimizer = wrapped(model)
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            for micro in range(step.passes - 1):
                with optimizer.no_sync():
                    model.loss(rank, number, micro, step.uses[rank]).backward()
            model.loss(rank, number, step.passes - 1, step.uses[rank]).backward()
            if step.skipped:
                optimizer.synchronize()
            else:
                optimizer.step()
        return model

    models = on_ranks(RANKS, MODEL, body)
    agreed([digest(model) for model in models])
    return models[0]


@pytest.mark.parametrize(("compression", "wire"), [("auto", "fp32"), ("auto", "int8"), ("topk", "int8")])
@pytest.mark.parametrize("seed", range(9))
def test_small_tensors_train_as_in_one_process(seed: int, compression: str, wire: str) -> None:
    expected, found = in_one_process(seed), on_all_ranks(seed, compression, wire)
    for (name, one), other, start in zip(
        expected.named_parameters(), found.parameters(), MODEL.parameters(), strict=True
    ):
        way, off = (float((one - another).detach().abs().max()) for another in (start, other))
        assert off <= (1e-5 if wire == "fp32" else 0.05 * way), f"{name} went {way:.3g}, and is {off:.3g} off"
