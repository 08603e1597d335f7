# SPDX-License-Identifier: Apache-2.0
"""Two workers, one of which fails. ``python faulty.py fault when step``.

``fault``: ``kill exit raise sleep``, what rank 1 does; ``when``: ``before``, ``inside`` or ``after`` its backward
pass of step ``step``, or at the ``handshake`` before all steps. The uncaught error of the other rank, and what
becomes of the processes, are what the tests look at.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

import agmerge

FAILS, STEPS = 1, 4
TIMEOUT = 5.0  # seconds: of every wait, once both have started
SLEEP = 300.0  # seconds: longer than any launch may last


class Plain(torch.optim.Optimizer):
    """SGD without what torch.optim imports for its own: a launch is mostly imports."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.param_groups.append({"params": list(param_group["params"])})

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.1 * parameter.grad


def fail(fault: str) -> None:
    """In one of the ways."""
    print(f"the worker {os.getpid()} fails at {time.time():.3f}", flush=True)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "exit":
        sys.exit(0)  # as if it had less data: no launcher can tell
    elif fault == "raise":
        raise FloatingPointError("of its own")
    time.sleep(SLEEP)


class Inside(torch.autograd.Function):
    """The identity, whose backward pass fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: str) -> Tensor:
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        fail(ctx.fault)
        return gradient, None


def main(fault: str, when: str, at: int) -> None:
    torch.manual_seed(0)
    agmerge.init()
    os.environ["AGMERGE_TIMEOUT"] = str(TIMEOUT)
    model = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40))
    if when == "handshake" and agmerge.rank() == FAILS:
        fail(fault)
    optimizer = agmerge.DistributedOptimizer(
        Plain(model.parameters()), model.named_parameters(), merging="layerwise", exchange="sparse"
    )
    for step in range(STEPS):
        now = when if agmerge.rank() == FAILS and step == at else ""
        if now == "before":
            fail(fault)
        optimizer.zero_grad()
        x = model[1](model[0](torch.randn(4, 40)))
        model[2](Inside.apply(x, fault) if now == "inside" else x).sum().backward()
        if now == "after":
            fail(fault)
        optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
