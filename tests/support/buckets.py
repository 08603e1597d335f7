# SPDX-License-Identifier: Apache-2.0
"""Gradients in buckets, as DistributedDataParallel hands them over, without one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from agmerge.engine.bucket_reducer import BucketReducer
from agmerge.engine.grad_scaler import LossScale
from agmerge.options.resolve import resolve, with_momentum_of
from agmerge.options.typed import Options
from agmerge.script.averaged_steps import AveragedModel
from agmerge.tensors.parameters import ParameterTable
from support import mlp, seeded

COMMON: dict[str, Any] = {"exchange": "sparse", "merging": "threshold", "density": 0.05}
NAMES = list(reversed([name for name, _ in seeded(mlp).named_parameters()]))


class Groups:
    """Parameters in one group."""

    def __init__(self, model: nn.Module) -> None:
        self.param_groups = [{"params": list(model.parameters())}]


def connected(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: Any = None,
    around: AveragedModel | None = None,
    **options: Any,
) -> BucketReducer:
    """Return a connected reducer of all parameters."""
    config = with_momentum_of(resolve(Options(scaler=scaler, **{**COMMON, **options})), optimizer)
    reducer = BucketReducer(ParameterTable(Groups(model), model.named_parameters()), config, optimizer, around)
    if scaler is not None:
        reducer.attach_scaler(LossScale(scaler))
    reducer.connect()
    return reducer


def passed(reducer: BucketReducer, model: nn.Module, without: tuple[str, ...] = ()) -> None:
    """Hand over one pass as DistributedDataParallel would: in one flat tensor, and back into ``p.grad``."""
    by_name = dict(model.named_parameters())
    flat = torch.cat([by_name[name].grad.reshape(-1) for name in NAMES])
    parts = flat.split([by_name[name].numel() for name in NAMES])
    for name, part in zip(NAMES, parts, strict=True):
        if name in without:
            part.zero_()
        reducer.hand_over(by_name[name], part.view_as(by_name[name]), used=name not in without)
    reducer.combine()
    for name, part in zip(NAMES, parts, strict=True):
        by_name[name].grad.copy_(part.view_as(by_name[name]))


def kept(reducer: BucketReducer, name: str) -> dict[str, torch.Tensor]:
    """Return copies of what is kept of a tensor."""
    return {
        kind: tensor.clone() for (kind, its), tensor in reducer.exchange.agreed.current.tensors.items() if its == name
    }
