# SPDX-License-Identifier: Apache-2.0
"""The same few steps with Horovod's own optimizer and with ours: ``python beside_horovod.py FOLDER``.

Each finding is a function of a wrapper; it returns a number that is 0 where all is well (or how it failed). Each
argument is a function of a wrapper too; what it returns, parameters after some steps, must be the same with both.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

import agmerge

sys.path.insert(0, str(Path(__file__).parent.parent))
from support import batch, loss_of, mlp, seeded  # noqa: E402

Wrap = Callable[..., Any]


def apart(model: nn.Module, name: str) -> float:
    """The largest difference of a parameter between rank 0 and this rank."""
    flat = torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])
    difference = (flat - hvd.broadcast(flat, 0, name=name)).abs().max()
    return float(hvd.allreduce(difference, op=hvd.Sum, name=f"{name}.sum"))


def steps(model: nn.Module, optimizer: Any, count: int) -> None:
    """Plain steps on this rank's batches."""
    for step in range(count):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()


def resume_with_weight_decay(wrap: Wrap, broadcasts: Any, name: str) -> float:
    """Finding 1: rank 0 has a checkpoint; parameters are broadcast first, then the optimizer's state."""
    model = seeded(mlp, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    if hvd.rank() == 0:
        loss_of(model, 0, 9).backward()
        optimizer.step()
        optimizer.zero_grad()
    broadcasts.broadcast_parameters(model.state_dict(), root_rank=0)
    broadcasts.broadcast_optimizer_state(optimizer, root_rank=0)
    return apart(model, name)


def unfreeze_after_wrapping(wrap: Wrap, broadcasts: Any, name: str) -> float:
    """Finding 5: a layer that learns only later."""
    model = seeded(mlp, 2)
    model[2].requires_grad_(False)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters())
    steps(model, optimizer, 1)
    model[2].requires_grad_(True)
    steps(model, optimizer, 3)
    return apart(model, name)


def group_after_wrapping(wrap: Wrap, broadcasts: Any, name: str) -> float:
    """Finding 5: a param group that is added later."""
    model = seeded(mlp, 3)
    inner = torch.optim.SGD([*model[0].parameters(), *model[4].parameters()], lr=0.1)
    optimizer = wrap(inner, named_parameters=model.named_parameters())
    steps(model, optimizer, 1)
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.1})
    steps(model, optimizer, 3)
    return apart(model, name)


def hooks_after_a_recast(wrap: Wrap, broadcasts: Any, name: str) -> float:
    """Finding 6: how many gradients do not leave during backward after ``model.to(dtype)``; 0 if they do."""
    model = seeded(mlp, 4)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters())
    model.to(torch.float64)
    steps(model, optimizer, 2)
    optimizer.zero_grad()
    if isinstance(optimizer, agmerge.DistributedOptimizer):
        before = optimizer.stats()["bytes_sent"]
        loss_of(model, hvd.rank(), 5).backward()
        left = optimizer.stats()["bytes_sent"] > before
    else:
        loss_of(model, hvd.rank(), 5).backward()
        left = len(optimizer._handles) > 0
    optimizer.step()
    return 0.0 if left else 1.0


def zero_grad_to_none(wrap: Wrap, broadcasts: Any, name: str) -> float:
    """Finding 8."""
    model = seeded(mlp, 5)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters())
    try:
        optimizer.zero_grad(set_to_none=True)
    except TypeError:
        return 1.0
    return 0.0


def bfloat16(wrap: Wrap, broadcasts: Any, name: str) -> float:
    """Finding 9."""
    model = seeded(mlp, 6).bfloat16()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters())
    try:
        steps(model, optimizer, 2)
    except ValueError:
        return 1.0
    return apart(model, name)


def channels_last(wrap: Wrap, broadcasts: Any, name: str) -> float:
    """Finding 9."""
    model = seeded(lambda: nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last), 7)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters())
    images = batch(hvd.rank(), 0, 4)[0].view(4, 8, 2, 2).repeat(1, 1, 3, 3)
    images = images.contiguous(memory_format=torch.channels_last)
    try:
        for _ in range(2):
            optimizer.zero_grad()
            model(images).square().mean().backward()
            optimizer.step()
    except ValueError:
        return 1.0
    return apart(model, name)


FINDINGS = (
    resume_with_weight_decay,
    unfreeze_after_wrapping,
    group_after_wrapping,
    hooks_after_a_recast,
    zero_grad_to_none,
    bfloat16,
    channels_last,
)


# -- arguments that mean the same with both ----------------------------------------------------------------------


def trained(wrap: Wrap, dense: str, make: Callable[[], nn.Module] = mlp, **options: Any) -> list[float]:
    """Parameters after four steps, with Horovod's objects as arguments. ``dense``: ours where none is given."""
    model = seeded(make, 8)
    if wrap is agmerge.DistributedOptimizer:
        options.setdefault("compression", dense)
    options = {name: value(model) if name == "groups" and callable(value) else value for name, value in options.items()}
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), **options)
    steps(model, optimizer, 4)
    return [round(float(value), 6) for parameter in model.parameters() for value in parameter.flatten()[:20]]


class Bag(nn.Module):
    """An embedding with gradients of sparse layout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(64, 10, mode="sum", sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embedding((x.abs() * 30).long().clamp(max=63))


def first_and_last(model: nn.Module) -> list[list[torch.Tensor]]:
    """A group, with the rest alone."""
    return [[*model[0].parameters(), *model[4].parameters()]]


ARGUMENTS: dict[str, dict[str, Any]] = {
    "compression none": {"compression": hvd.Compression.none},
    "compression fp16": {"compression": hvd.Compression.fp16},
    "op sum": {"op": hvd.Sum},
    "op average": {"op": hvd.Average},
    "predivide": {"gradient_predivide_factor": 4.0},
    "groups by number": {"groups": 2},
    "groups listed": {"groups": first_and_last},
    "num_groups": {"num_groups": 3},
    "sparse as dense": {"sparse_as_dense": True, "make": Bag},
    "process set, all": {"process_set": hvd.global_process_set},
    "process set, one": {"process_set": "one"},
}


def main(folder: Path) -> None:
    """Each finding and each argument with both optimizers."""
    os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    hvd.init()
    agmerge.init()  # takes the Horovod that it finds
    for finding in FINDINGS:
        found = {
            "horovod": finding(hvd.DistributedOptimizer, hvd, f"horovod.{finding.__name__}"),
            "agmerge": finding(agmerge.DistributedOptimizer, agmerge, f"agmerge.{finding.__name__}"),
        }
        (folder / f"{finding.__name__}.{hvd.rank()}.json").write_text(json.dumps(found))
    one = hvd.add_process_set([1])
    for argument, options in ARGUMENTS.items():
        given = {**options, "process_set": one} if options.get("process_set") == "one" else options
        found = {
            "horovod": trained(hvd.DistributedOptimizer, "", **given),
            "agmerge": trained(agmerge.DistributedOptimizer, "none", **given),
        }
        (folder / f"{argument}.{hvd.rank()}.json").write_text(json.dumps(found))
    agmerge.barrier()
    agmerge.shutdown()
    assert hvd.is_initialized()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
