# SPDX-License-Identifier: Apache-2.0
"""A turn of ``sync="updates"`` in a script's steps, after which model and optimizer are as they were; and its cost."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import agmerge
from agmerge.options.named_costs import kinds_of

# With its defaults: workers, and % of the loss with AdamW, from "Exchanging updates" in benchmarks/notebook/parity.md.
COSTS = ((2, 0.2), (4, 1.1), (8, 4.7))
KINDS = ("AdamW", "NAdam", "RAdam", "Adamax", "Adafactor", "Lion")  # optimizers that it is for


@contextmanager
def exchanging_updates(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, **given: Any
) -> Iterator[None]:
    """Collective. Exchange updates in the steps inside; then each worker's parameters and state are those of before.

    With updates each worker's optimizer sees its own gradients, so that the states of ranks come to differ.

    Args:
        model: in DistributedDataParallel, without any exchange of ours.
        optimizer: the one that steps.
        given: options of ``ddp.compress`` beside ``sync``.
    """
    restore = kept(optimizer)
    compressed = agmerge.integrations.ddp.compress(model, optimizer=optimizer, sync="updates", **given)
    yield  # an error inside ends the script, and nothing is restored
    compressed.close()
    restore()


def kept(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a function that sets parameters and state to what they are now. The copies are in the host's memory."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    before = [copied(parameter.detach()) for parameter in parameters]
    states = [
        (optimizer.state[parameter], {key: (value, copied(value)) for key, value in optimizer.state[parameter].items()})
        for parameter in parameters
        if parameter in optimizer.state
    ]

    @torch.no_grad()
    def restore() -> None:
        for parameter, saved in zip(parameters, before, strict=True):
            parameter.copy_(saved)
        for state, entries in states:
            for key, (value, saved) in entries.items():
                state[key] = value.copy_(saved) if isinstance(value, torch.Tensor) else saved

    return restore


def copied(value: Any) -> Any:
    """Return a copy of an entry of a state, of a tensor in the host's memory."""
    return value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def takes_updates(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``sync="updates"`` is for this optimizer: AdamW and its kind, where selection costs most."""
    return any(kind in KINDS for kind in kinds_of(optimizer))


def told_cost_of_updates(workers: int, optimizer: torch.optim.Optimizer) -> str:
    """Return in words how much ``sync="updates"`` increases the loss."""
    if "AdamW" not in kinds_of(optimizer):
        return "not measured with this optimizer"
    number, percent = next((row for row in COSTS if row[0] >= workers), COSTS[-1])
    return f"{percent:g} % higher with {number} workers in our tests"
