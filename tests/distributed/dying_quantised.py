# SPDX-License-Identifier: Apache-2.0
"""Three workers, one of which ends between the two phases of an exchange. ``python dying_quantised.py fault phase``.

``fault``: ``kill sleep``, what rank 1 does in step 1; ``phase``: ``first``, before it has sent its message, or
``second``, when it has added up its shard of all of them. The uncaught errors of the others are what the test looks at.
"""

from __future__ import annotations

import os
import sys
from typing import Any
from unittest import mock

import torch
from faulty import FAILS, TIMEOUT, Plain, fail
from torch import nn

import agmerge
from agmerge.exchanges.quantised.two_phase import TwoPhaseExchange

AT = 1  # the step


def main(fault: str, phase: str) -> None:
    torch.manual_seed(0)
    agmerge.init()
    os.environ["AGMERGE_TIMEOUT"] = str(TIMEOUT)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    optimizer = agmerge.DistributedOptimizer(
        Plain(model.parameters()), model.named_parameters(), merging="single", compression="eden"
    )
    method = {"first": "_send", "second": "_add_up"}[phase]
    call = getattr(TwoPhaseExchange, method)

    def failing(self: TwoPhaseExchange, *given: Any) -> Any:
        if agmerge.rank() == FAILS and step == AT:
            fail(fault)
        return call(self, *given)

    with mock.patch.object(TwoPhaseExchange, method, failing):
        for step in range(3):  # noqa: B007  `failing` reads it
            optimizer.zero_grad()
            model(torch.randn(4, 64)).sum().backward()
            optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
