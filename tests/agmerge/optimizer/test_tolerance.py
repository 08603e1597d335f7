# SPDX-License-Identifier: Apache-2.0
"""Options with which a script's own faults are let through: infinities, and replicas that differ."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

import agmerge
from agmerge import testing


def _stepped(net: torch.nn.Module, rank: int, factor: float, **options: Any) -> list[torch.Tensor]:
    optimizer = agmerge.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), compression="none", **options
    )
    (net(torch.full((1, 4), float(rank + 1))).sum() * factor).backward()
    optimizer.step()
    return [p.detach() for p in net.parameters()]


def test_infinities_are_kept_where_that_is_asked_for() -> None:
    net = torch.nn.Linear(4, 40)

    def body(rank: int) -> Any:
        return _stepped(copy.deepcopy(net), rank, float("inf") if rank else 1.0, nonfinite="keep")

    assert all(not bool(torch.isfinite(p).any()) for parameters in testing.run(2, body) for p in parameters)
    with pytest.raises(ValueError, match="nonfinite='keep' requires compression='none'"):
        agmerge.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), compression="eden-4", nonfinite="keep")


def test_replicas_that_differ_are_a_warning_where_that_is_asked_for() -> None:
    nets = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]

    def body(rank: int) -> Any:
        return _stepped(copy.deepcopy(nets[rank]), rank, 1.0, diverged="warn")

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        testing.run(2, body)
    assert any("AGM102" in str(one.message) for one in told)
    raised = testing.run(2, lambda rank: _stepped(copy.deepcopy(nets[rank]), rank, 1.0), return_errors=True)
    assert all(isinstance(one, agmerge.DivergenceError) for one in raised)
