# SPDX-License-Identifier: Apache-2.0
"""Scripts and optimizers that average gradients themselves, or sum something else: what each is told.

``averaging_twice.py FOLDER``, on two ranks. Rank 0 writes ``warned.json``: by scenario, its errors and warnings.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import all_reduce  # as scripts import it

import agmerge

Between = Callable[[list[torch.Tensor]], None]


def in_place(gradients: Iterable[torch.Tensor]) -> None:
    for gradient in gradients:
        all_reduce(gradient)
        gradient /= dist.get_world_size()


def scattered(gradients: Iterable[torch.Tensor]) -> None:
    for gradient in gradients:
        rows = gradient.new_empty(gradient.numel() // 2)
        dist.reduce_scatter_tensor(rows, gradient.view(-1))


def flattened(gradients: Iterable[torch.Tensor]) -> None:
    dist.all_reduce(torch.cat([gradient.view(-1) for gradient in gradients]))


def figures(gradients: Iterable[torch.Tensor]) -> None:
    for gradient in gradients:
        dist.all_reduce(gradient.square().mean())


def handed_round(gradients: Iterable[torch.Tensor]) -> None:
    for gradient in gradients:
        dist.broadcast(gradient, 0)


def alone(gradients: Iterable[torch.Tensor]) -> None:
    for gradient in gradients:
        dist.all_reduce(gradient.clone(), group=ALONE[dist.get_rank()])


def averaging(average: Between) -> Any:
    """Return a class of optimizers that calls ``average`` with all gradients before it steps."""

    class Averaging(torch.optim.AdamW):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            average([p.grad for group in self.param_groups for p in group["params"] if p.grad is not None])
            return super().step(closure)

    return Averaging


def train(optimizer_class: Any, between: Between | None = None, **options: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    inner = optimizer_class(model.parameters(), lr=1e-3)
    optimizer = agmerge.DistributedOptimizer(inner, model.named_parameters(), **options)
    for step in range(6):
        optimizer.zero_grad()
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        model(x).square().mean().backward()
        if between is not None:
            between([p.grad.clone() for p in model.parameters() if p.grad is not None])
        optimizer.step()
    optimizer.close()


SCENARIOS: dict[str, Callable[[], None]] = {
    "optimizer": lambda: train(averaging(in_place)),
    "optimizer, scattered": lambda: train(averaging(scattered)),
    "optimizer, flattened": lambda: train(averaging(flattened), compression="none"),
    "updates, in place": lambda: train(averaging(in_place), sync="updates"),
    "updates, flattened": lambda: train(averaging(flattened), sync="updates"),
    "updates, handed round": lambda: train(averaging(handed_round), sync="updates"),
    "updates, figures": lambda: train(averaging(figures), figures, sync="updates"),
    "updates, alone": lambda: train(averaging(alone), alone, sync="updates"),
    "script": lambda: train(torch.optim.AdamW, flattened),
    "nothing": lambda: train(torch.optim.AdamW),
    "figures": lambda: train(averaging(figures), figures),
    "handed round": lambda: train(averaging(handed_round)),
    "alone": lambda: train(averaging(alone), alone),
}

if __name__ == "__main__":
    dist.init_process_group("gloo")
    agmerge.init()
    ALONE = [dist.new_group([rank]) for rank in range(2)]
    found = {}
    for name, scenario in SCENARIOS.items():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                scenario()
                refused = []
            except ValueError as error:
                refused = [str(error)]
        found[name] = [*refused, *(str(one.message) for one in said)]
    if dist.get_rank() == 0:
        (Path(sys.argv[1]) / "warned.json").write_text(json.dumps(found), encoding="utf-8")
    agmerge.shutdown()
    dist.destroy_process_group()
