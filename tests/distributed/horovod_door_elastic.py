# SPDX-License-Identifier: Apache-2.0
"""Elastic script in Horovod's words: a worker kills itself, a slot is added, and all end with the same model.

Arguments: the file that the discovery script prints, and epochs.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

HOSTS, EPOCHS = Path(sys.argv[1]), int(sys.argv[2])
NAME = os.environ["HOROVOD_RANK"]  # of this process, whatever its rank becomes
BATCH = 8

hvd.init()
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(96, 20), torch.randint(0, 3, (96,)))
model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
sampler = hvd.elastic.ElasticSampler(data)
loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=sampler)
used: list[int] = []  # samples of the epoch in which nobody came or went


def on_reset() -> None:
    print(f"reset {NAME}: {hvd.size()} workers", flush=True)


@hvd.elastic.run
def train(state: Any) -> int:
    while state.epoch < EPOCHS:
        for number, (x, y) in enumerate(loader):
            if NAME == "1" and (state.epoch, state.batch) == (1, 1):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            sampler.record_batch(number, BATCH)
            state.batch += 1
            state.commit()
        if state.epoch == 1 and hvd.rank() == 0:
            HOSTS.write_text("localhost:3\n")
        if state.epoch == 1:  # wait for the newcomer, so that the test depends on no time
            while hvd.size() == 1:
                state.check_host_updates()
        state.epoch, state.batch = state.epoch + 1, 0
        sampler.set_epoch(state.epoch)
        state.commit()
    return int(hvd.size())


state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0, sampler=sampler)
state.register_reset_callbacks([on_reset])
size = train(state)
models = hvd.allgather_object([float(p.detach().sum()) for p in model.parameters()])
print(f"end {NAME}: {size} workers, {len(set(map(str, models)))} model, {len(sampler)} left", flush=True)
