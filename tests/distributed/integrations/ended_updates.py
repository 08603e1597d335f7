# SPDX-License-Identifier: Apache-2.0
"""A whole script that trains with ``sync="updates"`` and ends: ``ended_updates.py FOLDER ROAD END``.

``ROAD``: ``ddp``, ``accelerate`` or ``wrapper``. ``END``: ``close``, ``consolidate``, ``shared``, ``error`` or
``silent``. Writes, by rank, digests of what it saw.
"""

from __future__ import annotations

import copy
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parents[3]), str(Path(__file__).parents[2])]  # tests/ has folders of these names
from support import batch, digest, loss_of, mlp, seeded  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import agmerge  # noqa: E402

OPTIONS: dict[str, Any] = {"sync": "updates", "compression": "topk", "density": 0.01}


def looked(model: Any, net: torch.nn.Module) -> dict[str, str]:
    """What a script sees of the model in the middle of training."""
    x = batch(0, 99)[0]
    training = model(x)  # the worker's own
    model.eval()
    with torch.no_grad():
        evaluated = model(x)
        inside = digest(net)
    saved, by_name = model.state_dict(), net.state_dict()
    copied = pickle.loads(pickle.dumps(copy.deepcopy(net)))
    with torch.no_grad():
        assert not torch.equal(copied(x), evaluated)  # a copy is one of the worker's own, without hooks
    model.train()
    return {
        "evaluated": digest([evaluated]),
        "trained": digest([training.detach()]),
        "saved": digest(list(saved.values())),
        "saved by name": digest(list(by_name.values())),
        "own": digest(net),
        "own behind evaluation": inside,
    }


def train(road: str, end: str) -> dict[str, Any]:
    """Train, look, and end as ``end`` says."""
    net = seeded(mlp)
    inner = torch.optim.AdamW(net.parameters(), lr=0.01)
    seen: dict[str, Any] = {}
    optimizer: Any = inner
    if road == "wrapper":
        agmerge.init()
        optimizer = held = agmerge.DistributedOptimizer(inner, net.named_parameters(), **OPTIONS)
        model: Any = net
    elif road == "ddp":
        torch.distributed.init_process_group("gloo")
        model = DistributedDataParallel(net)
        held = agmerge.integrations.ddp.compress(model, optimizer=inner, **OPTIONS)
    else:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(net, inner)
        held = agmerge.integrations.accelerate.compress(accelerator, model, **OPTIONS)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, agmerge.rank(), step).backward()
        optimizer.step()
    if road != "wrapper":
        seen["looked"] = looked(model, net)
        loss_of(model, agmerge.rank(), 5).backward()
        optimizer.step()
    if end == "close":
        held.close() if road != "accelerate" else accelerator.end_training()
    elif end == "consolidate":
        held.consolidate()
    elif end == "shared":
        with held.shared():
            seen["shared"] = digest(net)
    elif end == "error":
        try:
            raise RuntimeError("of the script's own")
        except RuntimeError:
            held.close()  # in a finally, say: nobody is waited for
    seen["last"] = digest(net)
    return seen


if __name__ == "__main__":
    folder, road, end = sys.argv[1:]
    found = train(road, end)
    Path(folder, f"{agmerge.rank()}.json").write_text(json.dumps(found))
