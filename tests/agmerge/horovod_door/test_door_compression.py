# SPDX-License-Identifier: Apache-2.0
"""Compressors that a script passes to Horovod's optimizer: in Horovod's form, in GRACE's, or in a communicator."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import batch, mlp, on_ranks, seeded, sgd
from torch import Tensor, nn
from torch.nn import functional as F

import agmerge
from agmerge.horovod_door.distributed_optimizer import DistributedOptimizer

MODEL = seeded(mlp)


class Horovods:
    """A cast, without names."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor.bfloat16(), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx)


class Graces:
    """The same, with names."""

    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Any]:
        return [tensor.bfloat16()], tensor.dtype

    def decompress(self, tensors: list[Tensor], ctx: Any) -> Tensor:
        return tensors[0].to(ctx)


class Memory:
    """Memory that counts, and keeps nothing."""

    def __init__(self) -> None:
        self.calls = 0

    def compensate(self, tensor: Tensor, name: str) -> Tensor:
        self.calls += 1
        return tensor

    def update(self, tensor: Tensor, name: str, compressor: Any, tensors: list[Tensor], ctx: Any) -> None:
        """Do nothing."""


class Allreduce:
    """Communicator: it adds tensors up."""

    def __init__(self) -> None:
        self.compressor, self.memory = Graces(), Memory()


def trained(optimizer: Any, model: nn.Module, rank: int) -> list[Tensor]:
    for step in range(3):
        optimizer.zero_grad()
        inputs, targets = batch(rank, step)
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("made", [Allreduce, Graces, Horovods])
def test_a_compressor_of_either_form_is_used(made: type) -> None:
    def body(rank: int, model: nn.Module) -> list[list[Tensor]]:
        found = []
        for wrap in (DistributedOptimizer, agmerge.DistributedOptimizer):
            own, given = copy.deepcopy(model), made
            if wrap is agmerge.DistributedOptimizer:
                given = agmerge.grace(Graces(), sums=made is not Graces)
            elif made is not Horovods:
                given = made()
            found.append(trained(wrap(sgd(own), own.named_parameters(), given), own, rank))
            if made is Allreduce and wrap is DistributedOptimizer:
                assert given.memory.calls == 3 * len(found[0])
        return found

    for found, expected in on_ranks(2, MODEL, body):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
