"""Two workers, one of which fails. ``python faulty.py fault when step``.

``fault``: ``kill exit raise sleep``, what rank 1 does; ``when``: ``before inside after`` its backward pass of step
``step``. The deadline is ``AGMERGE_TIMEOUT``. The other rank's uncaught error is what the tests read.
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

VICTIM, STEPS = 1, 4
SLEEP = 60.0  # seconds: longer than any launch may last


def strike(fault: str) -> None:
    """Fail in one of the ways."""
    print(f"rank {agmerge.rank()} pid {os.getpid()}: {fault}", flush=True)
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
        strike(ctx.fault)
        return gradient, None


def main(fault: str, when: str, at: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)  # imports much: before anybody waits
    agmerge.init()
    optimizer = agmerge.DistributedOptimizer(inner, model.named_parameters(), merging="layerwise", exchange="sparse")
    for step in range(STEPS):
        now = when if agmerge.rank() == VICTIM and step == at else ""
        if now == "before":
            strike(fault)
        optimizer.zero_grad()
        x = model[1](model[0](torch.randn(4, 40)))
        model[2](Inside.apply(x, fault) if now == "inside" else x).sum().backward()
        if now == "after":
            strike(fault)
        optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
