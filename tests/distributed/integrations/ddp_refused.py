# SPDX-License-Identifier: Apache-2.0
"""What ddp.compress() refuses, and what a wrapper says of a model in DistributedDataParallel."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from support import backward, mlp, seeded, sgd, wrap
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel

import agmerge
from agmerge.integrations import ddp


def parallel(**options: Any) -> DistributedDataParallel:
    """A model."""
    return DistributedDataParallel(seeded(mlp), **options)


class DeepSpeedEngine(nn.Module):
    """One by name."""


DeepSpeedEngine.__module__ = "deepspeed.runtime.engine"


class FromTorchft(DistributedDataParallel):
    """One by name."""


FromTorchft.__module__, FromTorchft.__name__ = "torchft.ddp", "DistributedDataParallel"


def _hooked() -> Any:
    model = parallel()
    model.register_comm_hook(None, allreduce_hook)
    return ddp.compress(model, compression="topk")


def _twice() -> Any:
    model = parallel()
    ddp.compress(model, compression="topk")
    return ddp.compress(model, compression="topk")


def _wrapped_already() -> Any:
    net = seeded(mlp)
    optimizer = wrap(net)
    try:
        return ddp.compress(DistributedDataParallel(net), compression="topk")
    finally:
        optimizer.close()


def _a_wrapper() -> Any:
    net = seeded(mlp)
    optimizer = wrap(net)
    try:
        return ddp.compress(DistributedDataParallel(net), optimizer=optimizer)
    finally:
        optimizer.close()


def _other_parameters() -> Any:
    net, more = seeded(mlp), nn.Linear(3, 3)
    inner = torch.optim.SGD([*net.parameters(), *more.parameters()], lr=0.1, momentum=0.9)
    return ddp.compress(DistributedDataParallel(net), optimizer=inner, compression="dgc")


def _embedding() -> Any:
    return ddp.compress(DistributedDataParallel(nn.Embedding(50, 8, sparse=True)), compression="topk")


def _delayed() -> Any:
    net = seeded(mlp)
    delayed = [("0.weight", net[0].weight)]
    model = DistributedDataParallel(net, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=net[2].weight)
    return ddp.compress(model, compression="topk")


def _steps_in_backward() -> Any:
    from torch.distributed.optim import _apply_optimizer_in_backward

    net = seeded(mlp)
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    return ddp.compress(DistributedDataParallel(net), compression="topk")


def _sharded(version: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    net = seeded(mlp)
    if version == 2:
        fully_shard(net, mesh=init_device_mesh("cpu", (agmerge.size(),)))
        return ddp.compress(net)
    made = FullyShardedDataParallel.__new__(FullyShardedDataParallel)  # on the CPU it cannot be built
    nn.Module.__init__(made)
    return ddp.compress(made)


REFUSALS: dict[str, Callable[[], Any]] = {
    "plain": lambda: ddp.compress(seeded(mlp)),
    "data parallel": lambda: ddp.compress(DataParallel(seeded(mlp))),
    "fsdp 1": lambda: _sharded(1),
    "fsdp 2": lambda: _sharded(2),
    "deepspeed": lambda: ddp.compress(DeepSpeedEngine()),
    "torchft": lambda: ddp.compress(FromTorchft(seeded(mlp))),
    "hooked": _hooked,
    "twice": _twice,
    "wrapped already": _wrapped_already,
    "a wrapper": _a_wrapper,
    "other parameters": _other_parameters,
    "embedding": _embedding,
    "delayed": _delayed,
    "skipping": lambda: ddp.compress(parallel(skip_all_reduce_unused_params=True, find_unused_parameters=True)),
    "steps in backward": _steps_in_backward,
    "passes": lambda: ddp.compress(parallel(), backward_passes_per_step=2),
    "process set": lambda: ddp.compress(parallel(), process_set=[0]),
    "dear": lambda: ddp.compress(parallel(), merging="dear"),
    "unknown": lambda: ddp.compress(parallel(), colour="red"),
    "density": lambda: ddp.compress(parallel(), density=0.01),
    "dgc": lambda: ddp.compress(parallel(), compression="dgc"),
    "updates": lambda: ddp.compress(parallel(), sync="updates"),
    "updates, static": lambda: ddp.compress(parallel(static_graph=True), sync="updates"),
    "every": lambda: ddp.compress(parallel(), compression="topk", every=4),
}


def refused() -> dict[str, str]:
    """The kind of the error and its text, by what was tried."""
    said = {}
    for name, try_it in REFUSALS.items():
        try:
            try_it()
            said[name] = ""
        except (TypeError, ValueError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def guarded() -> dict[str, str]:
    """What a wrapper says of a model that is averaged, and where it is not: empty."""
    said = {}

    def tried(name: str, net: nn.Module, **options: Any) -> None:
        try:
            agmerge.DistributedOptimizer(sgd(net), net.named_parameters(), **options).close()
            said[name] = ""
        except ValueError as error:
            said[name] = str(error)

    alive, gone = parallel(), parallel()
    gone.itself = [gone]  # a circle, which nobody can reach in a moment
    left = gone.module
    del gone
    tried("outside", alive)
    tried("inside", alive.module)
    tried("updates", alive.module, sync="updates")
    tried("gone", left)
    with alive.no_sync():
        tried("no_sync", alive.module)
    for views in (False, True):
        net = seeded(mlp)
        optimizer = wrap(net)
        later = DistributedDataParallel(net, gradient_as_bucket_view=views)  # as a framework that is given an optimizer
        backward(later, agmerge.rank(), 0)
        try:
            optimizer.step()
            said[f"later, {views}"] = ""
        except agmerge.AGMergeError as error:
            said[f"later, {views}"] = str(error)
        optimizer.close()
    compressed = ddp.compress(alive, compression="topk")
    tried("compressed", alive.module)
    compressed.close()
    gc.collect()
    return said
