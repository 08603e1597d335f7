# SPDX-License-Identifier: Apache-2.0
"""A script that has its own process group; agmerge takes it and leaves it. ``python borrowing.py FOLDER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # its functions keep the group that there is when it is imported, and optimizers import it

import agmerge


def threads() -> int:
    """How many threads of Gloo's this process has."""
    return sum("gloo" in name.read_text() for name in Path("/proc/self/task").glob("*/comm"))


dist.init_process_group("gloo")
agmerge.init()
model = torch.nn.Linear(40, 40)
agmerge.broadcast_parameters(model.named_parameters())
inner = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = agmerge.DistributedOptimizer(inner, model.named_parameters(), check_every=1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.full((4, 40), float(agmerge.rank() + step))).sum().backward()
    optimizer.step()
name, rank = agmerge.backend_name(), agmerge.rank()
agmerge.shutdown()
total = torch.ones(1)
dist.all_reduce(total)  # the script's own group still works
dist.destroy_process_group()
(Path(sys.argv[1]) / f"borrowed.{rank}.json").write_text(json.dumps([name, total.item(), threads()]))
