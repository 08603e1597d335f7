# SPDX-License-Identifier: Apache-2.0
"""A worker of an elastic job of agmerge: ``python agmerge_worker.py FOLDER MODEL COMPRESSION SUSPECT``."""

from __future__ import annotations

import sys

from task import Record, network, optimizer_of

import agmerge

folder, kind, compression, suspect = sys.argv[1:]
model, loss_of = network(kind)
record = Record(folder)
agmerge.init(elastic=agmerge.Elastic(suspect=float(suspect)))
optimizer = agmerge.DistributedOptimizer(
    optimizer_of(model), model.named_parameters(), compression=compression, merging="threshold", timeout=120
)
state = agmerge.elastic.State(model=model, optimizer=optimizer, step=0)
while True:
    record.begin()
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()
    state.step += 1
    state.commit()
    record.end(state.step, agmerge.size())
