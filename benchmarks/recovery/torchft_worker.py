# SPDX-License-Identifier: Apache-2.0
"""A worker of torchft's Manager, a replica group of its own: ``python torchft_worker.py FOLDER MODEL NUMBER WAY``.

``WAY``: "manager", its ``allreduce`` of all gradients in one tensor after the backward pass; or "ddp", its wrapper of
DistributedDataParallel. In 0.2.0 over Gloo that wrapper ends a survivor's process (``assert fut._fut``) if another one
dies in an all-reduce: after an error in ``Work.wait`` its future was never made.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
from task import Record, network, optimizer_of
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

folder, kind, number, way = sys.argv[1:]
model, loss_of = network(kind)
inner = optimizer_of(model)
record = Record(folder)


def state_dict() -> dict[str, Any]:
    """Return what a newcomer is handed."""
    return {"model": model.state_dict(), "optimizer": inner.state_dict()}


def load_state_dict(values: dict[str, Any]) -> None:
    """Take over what another worker has handed."""
    model.load_state_dict(values["model"])
    inner.load_state_dict(values["optimizer"])


store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
manager = Manager(  # the lighthouse is named by TORCHFT_LIGHTHOUSE; time-outs are its own, 60 s
    pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
    load_state_dict=load_state_dict,
    state_dict=state_dict,
    min_replica_size=2,
    replica_id=f"worker_{number}",
    rank=0,
    world_size=1,
    store_addr="127.0.0.1",
    store_port=store.port,
    hostname="127.0.0.1",
)
optimizer = Optimizer(manager, inner)
parallel = DistributedDataParallel(manager, model) if way == "ddp" else model


def average() -> None:
    """Replace gradients by their mean over workers; after an error they are not used."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    together = torch.cat([gradient.flatten() for gradient in gradients])
    manager.allreduce(together).wait()
    for gradient, mean in zip(gradients, together.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


while True:
    record.begin()
    before = manager.current_step()
    optimizer.zero_grad()
    loss_of(parallel).backward()
    if way == "manager":
        average()
    optimizer.step()
    if manager.current_step() > before:  # else the step did not count: it is made again
        record.end(manager.current_step(), manager.num_participants())
