# SPDX-License-Identifier: Apache-2.0
"""A worker that torchrun starts again: ``python torchrun_worker.py FOLDER MODEL EVERY``; a file each EVERY steps."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from task import Record, network, optimizer_of
from torch.nn.parallel import DistributedDataParallel

folder, kind, every = sys.argv[1], sys.argv[2], int(sys.argv[3])
model, loss_of = network(kind)
record = Record(folder)
dist.init_process_group("gloo")
optimizer, step = optimizer_of(model), 0
saved, unfinished = Path(folder, "checkpoint.pt"), Path(folder, "checkpoint.new")
if saved.exists():
    values = torch.load(saved, weights_only=True)
    model.load_state_dict(values["model"])
    optimizer.load_state_dict(values["optimizer"])
    step = values["step"]
model = DistributedDataParallel(model)
while True:
    record.begin()
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()
    step += 1
    if step % every == 0 and dist.get_rank() == 0:
        values = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(values, unfinished)
        unfinished.replace(saved)  # whoever is killed while it writes leaves the file of before
    record.end(step, dist.get_world_size())
