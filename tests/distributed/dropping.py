# SPDX-License-Identifier: Apache-2.0
"""A scenario of scenarios.py: optimizers that were not closed."""

from __future__ import annotations

import os
import time

from support import loss_of, mlp, seeded, train, wrap

import agmerge


def dropped() -> list[int]:
    """Threads and files after each of some optimizers that were dropped, not closed, on one rank earlier.

    Every other one with messages on their way.
    """
    seen, kept = [], None
    for turn in range(7):
        model = seeded(mlp, 12)
        optimizer = wrap(model, exchange="sparse")
        train(model, optimizer, agmerge.rank(), range(2))
        if turn % 2:
            loss_of(model, agmerge.rank(), 2).backward()
        kept = optimizer if agmerge.rank() else None
        del optimizer
        agmerge.barrier()
        time.sleep(0.2)  # threads of Gloo's end
        seen.append(sum(len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd")))
    del kept
    return seen
