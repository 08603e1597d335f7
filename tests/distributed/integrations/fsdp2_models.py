# SPDX-License-Identifier: Apache-2.0
"""The model of the FSDP2 scenarios, on four workers: two replicas of two shards each, and what it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from support import batch, seeded
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import agmerge

REPLICA, SHARD = "replicate", "shard"
Inner = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def network() -> nn.Sequential:
    """Three layers in uneven shards, of the last one a rank has nothing; weights of two are sparse."""
    return nn.Sequential(nn.Linear(32, 65), nn.Tanh(), nn.Linear(65, 64), nn.Tanh(), nn.Linear(64, 1))


def sharded(mesh: DeviceMesh, seed: int = 0, **options: Any) -> nn.Sequential:
    """The network, each layer sharded by itself along ``mesh``."""
    model = seeded(network, seed)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plain_sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def several(parameters: Iterable[Tensor]) -> Any:
    """Muon for the matrices, AdamW for what is none, and for the last layer: of one row torch's Muon steps no shard."""
    given = list(parameters)
    muon = getattr(torch.optim, "Muon", torch.optim.RMSprop)
    matrices = [p for p in given if p.dim() == 2 and p.shape[0] > 1]
    return [muon(matrices, lr=0.02), adamw([p for p in given if all(p is not one for one in matrices)])]


def wrapped(model: nn.Module, mesh: DeviceMesh, inner: Inner = sgd, **options: Any) -> agmerge.DistributedOptimizer:
    """The optimizer among the replicas of this rank's shard; its plan goes by sizes, and selections are sent."""
    options = {"process_set": mesh[REPLICA], "merging": "threshold", "exchange": "sparse", **options}
    return agmerge.DistributedOptimizer(inner(model.parameters()), model.named_parameters(), **options)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    """The loss of ``model`` on the batch of ``rank`` and ``step``."""
    x, _ = batch(rank, step)
    return F.mse_loss(model(x).float(), x[:, :1])


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, dist.get_rank(), step).backward()
    optimizer.step()


def alone(inner: Inner, steps: int, passes: int = 1, most: float | None = None, scale: float = 1.0) -> list[Tensor]:
    """The parameters after so many steps with the batches of all ranks, on this rank by itself.

    ``passes``: of each rank, a step. ``most``: the norm to which gradients are clipped. ``scale``: of the gradients.
    """
    model = seeded(network)
    optimizer = inner(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(dist.get_world_size()):
            for number in range(passes):
                (loss_of(model, rank, step * passes + number) * (scale / dist.get_world_size())).backward()
        if most is not None:
            nn.utils.clip_grad_norm_(model.parameters(), most)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def apart(model: nn.Module, expected: list[Tensor]) -> float:
    """The largest difference between what this rank holds of ``model`` and the same of whole tensors ``expected``."""
    worst = 0.0
    for parameter, whole in zip(model.parameters(), expected, strict=True):
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        worst = max(worst, float((full.detach() - whole).abs().max()))
    return worst


def locals_of(model: nn.Module) -> list[Tensor]:
    """What this rank holds of each parameter."""
    with torch.no_grad():
        return [p.to_local().clone() if isinstance(p, DTensor) else p.detach().clone() for p in model.parameters()]


class Twin:
    """Plain parameters that hold what this rank holds of a sharded model, and get its gradients.

    They are exchanged by the same wrapper among the same ranks: what comes of it must have the same bits.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, inner: Inner, **options: Any) -> None:
        self._names = [name for name, _ in model.named_parameters()]
        held = zip(self._names, locals_of(model), strict=True)
        self.parameters = {name: nn.Parameter(local) for name, local in held if local.numel()}
        options = {"process_set": mesh[REPLICA], "merging": "threshold", "exchange": "sparse", **options}
        self.optimizer = agmerge.DistributedOptimizer(
            inner(self.parameters.values()), self.parameters.items(), **options
        )

    def step(self, gradients: dict[str, Tensor]) -> None:
        """One step with these gradients, in their order; each is that of a sum, to the bit."""
        self.optimizer.zero_grad()
        for name, gradient in gradients.items():
            (self.parameters[name] * gradient).sum().backward()
        self.optimizer.step()


def own_gradients(model: nn.Module) -> dict[str, Tensor]:
    """This rank's gradients of ``model`` as they will be, by name in the order in which they become ready.

    Hooks run in the order in which they were registered: register this one before the wrapper's.
    """
    seen: dict[str, Tensor] = {}

    def watch(name: str, parameter: Any) -> None:
        def hook(one: Any) -> None:
            if one.grad.to_local().numel():
                seen[name] = one.grad.to_local().clone()

        parameter.register_post_accumulate_grad_hook(hook)

    for name, parameter in model.named_parameters():
        watch(name, parameter)
    return seen


def same(model: nn.Module, twin: Twin) -> bool:
    """Whether this rank holds the same bits of both."""
    held = [local for local in locals_of(model) if local.numel()]
    return all(torch.equal(a, b.detach()) for a, b in zip(held, twin.parameters.values(), strict=True))
