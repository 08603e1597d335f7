# SPDX-License-Identifier: Apache-2.0
"""A worker of Horovod's elastic launcher: ``python horovod_worker.py FOLDER MODEL WHOSE``, the optimizer's library."""

from __future__ import annotations

import sys
from typing import Any

import horovod.torch as hvd
from task import Record, network, optimizer_of

folder, kind, whose = sys.argv[1:]
model, loss_of = network(kind)
record = Record(folder)
hvd.init()
if whose == "agmerge":
    import agmerge

    optimizer = agmerge.DistributedOptimizer(
        optimizer_of(model), model.named_parameters(), compression="eden", merging="threshold"
    )
else:
    optimizer = hvd.DistributedOptimizer(optimizer_of(model), model.named_parameters())


@hvd.elastic.run
def train(state: Any) -> None:
    """Train without an end. Each step is committed, so that a death costs one at most."""
    while True:
        record.begin()
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        state.step += 1
        state.commit()
        record.end(state.step, hvd.size())


train(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0))
