# SPDX-License-Identifier: Apache-2.0
"""A worker of an elastic job: trains to a number of steps, and writes a line after each.

Told to end, by SIGTERM, it leaves after a whole step. The setting's ``place``: where its tensors are.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

import agmerge
from agmerge.runtime import workers

folder, steps, setting = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
place = setting.pop("place", "cpu")
torch.manual_seed(os.getpid())
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 64)).to(place)
options = {"suspect": 2.0, "patience": 30.0, **setting.pop("elastic", {})}
agmerge.init(elastic=agmerge.Elastic(**options))
inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
optimizer = agmerge.DistributedOptimizer(inner, model.named_parameters(), check_every=1, timeout=30.0, **setting)
state = agmerge.elastic.State(model=model, optimizer=optimizer, step=0, seen=torch.zeros(1, device=place))
signal.signal(signal.SIGTERM, lambda *_: state.leave())


def generation() -> int:
    """Return the number of the present generation."""
    assert workers._job is not None
    return workers._job.group.generation.number


@state.retried
def counted() -> int:
    """Collective. Return how many workers take part."""
    return int(agmerge.allreduce(torch.ones(1), op=agmerge.Sum))


with open(folder / f"{os.getpid()}.lines", "a", encoding="utf-8") as lines:
    while state.step < steps:
        inputs = torch.randn(8, 64).to(place)
        optimizer.zero_grad()
        (model(inputs) - inputs).square().mean().backward()
        optimizer.step()
        state.step += 1
        state.seen += 8
        assert state.seen.device == inputs.device and state.seen.item() == 8 * state.step
        reducer = optimizer._reducer
        shared = model.parameters() if reducer.combines_gradients else reducer.replica.shared.base.values()
        digest = hashlib.sha256(b"".join(one.detach().cpu().numpy().tobytes() for one in shared)).hexdigest()
        same = f"{digest}, {counted()} workers"
        lines.write(json.dumps([state.step, agmerge.size(), same, time.monotonic(), generation()]) + "\n")
        lines.flush()
        if not state.commit():
            try:
                agmerge.rank()
            except agmerge.AGMergeError as error:
                print(error, flush=True)
            break
        time.sleep(0.03)
agmerge.shutdown()
