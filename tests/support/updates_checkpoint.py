# SPDX-License-Identifier: Apache-2.0
"""What tests of ``sync="updates"`` share: ways to exchange, what a rank carries, and what ranks save."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import agmerge
import merging
from agmerge import testing
from support import mlp, on_ranks, seeded, train, wrap

MODEL = seeded(mlp)
SMALL = merging.get("threshold", bytes=4096)  # a merge buffer a layer: fragments have something to take turns with
UPDATES: dict[str, Any] = {"sync": "updates", "compression": "topk", "merging": SMALL}
DENSE = {"compression": "none", "exchange": "sparse", "merging": SMALL}
CELLS: dict[str, dict[str, Any]] = {
    "apply": {},
    "hold": {"carry": "hold"},
    "apply, every 4": {"every": 4},
    "hold, every 4": {"carry": "hold", "every": 4},
    "fragments": {"every": 4, "fragments": 2},
    "fragments, hold": {"every": 4, "fragments": 4, "carry": "hold"},
    "outer": {"every": 3, "outer": agmerge.Nesterov()},
    "outer, hold": {"every": 3, "outer": agmerge.Nesterov(), "carry": "hold"},
    "outer, fragments": {"every": 4, "fragments": 2, "outer": agmerge.Nesterov()},
    "decay": {"carry": "hold", "decay": 0.9},
    "overlap": {"overlap": 1},
    "overlap, every 4": {"overlap": 2, "every": 4, "fragments": 2},
    "int4": {"wire": "int4", "density": 1.0, "every": 2},
    "none": {"compression": "none", "every": 3},
    "fp16": {"compression": "fp16", "every": 2},
    "thresholds": {"compression": "redsync"},
    "two-level": {"exchange": "two-level", "carry": "hold"},
    "powersgd": {"compression": "powersgd"},
    "acpsgd": {"compression": "acpsgd", "every": 2},
    "acpsgd, overlap": {"compression": "acpsgd", "overlap": 1},
    "oktopk": {"exchange": "oktopk"},
    "ahead": {"sparsify": "ahead"},
}
HALF, STEPS = 7, 14


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def started(model: nn.Module, **options: Any) -> Any:
    return wrap(model, adamw(model), **{**UPDATES, **options})


def base(optimizer: Any) -> dict[str, Tensor]:
    return dict(optimizer.state_dict()["agmerge"]["updates"]["base"])


def carried(optimizer: Any) -> dict[str, Tensor]:
    """All that this rank has not sent."""
    return dict(testing.inspect(optimizer).residuals)


def mean(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean over ranks, in float64."""
    return {name: torch.stack([part[name].double() for part in parts]).mean(0) for name in parts[0]}


def near(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name].double(), expected[name].double(), rtol=0, atol=atol, msg=name)


@contextmanager
def told() -> Iterator[list[str]]:
    """What ranks are warned of inside. Around all of them: filters of warnings are of the process, not of a thread."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(warning.message) for warning in caught]


def saved(size: int, steps: int = HALF, **options: Any) -> list[dict[str, Any]]:
    """What each rank saves after some steps: its model, its state, and all ranks' in one on rank 0."""

    def body(rank: int, model: nn.Module) -> dict[str, Any]:
        optimizer = started(model, **options)
        train(model, optimizer, rank, range(steps))
        optimizer.flush()
        found = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "base": base(optimizer),
            "carried": carried(optimizer),
        }
        return copy.deepcopy({**found, "gathered": agmerge.gather_state(optimizer)})

    return on_ranks(size, MODEL, body)
