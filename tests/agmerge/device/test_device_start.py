# SPDX-License-Identifier: Apache-2.0
"""What ranks start with on devices: rank 0's parameters and optimizer state, and kernels on all of them or none."""

from __future__ import annotations

import threading

import pytest
import torch
from pretend.device import Device
from pretend.training import on_devices
from support.device_training import host
from torch import nn

import agmerge
from agmerge.step import agreed_state


def test_parameters_and_state_of_devices_are_those_of_the_root() -> None:
    def body(rank: int, device: Device) -> list[torch.Tensor]:
        weights = nn.ParameterList(torch.full((5, 3), rank + place).to("pretend") for place in (0.25, 0.5))
        weights.append(torch.full((2,), float(rank)))  # on the host
        optimizer = torch.optim.SGD(weights.parameters(), lr=0.1, momentum=0.9, foreach=False)
        if rank == 0:
            for weight in weights:
                weight.grad = torch.ones_like(weight)
            optimizer.step()
        agmerge.broadcast_parameters(weights.named_parameters())
        agmerge.broadcast_optimizer_state(optimizer)
        assert device.books.races == []
        momenta = [optimizer.state[weight]["momentum_buffer"] for weight in weights]
        return [host(tensor) for tensor in (*weights, *momenta)]

    first, *others = on_devices(3, body)
    assert all(torch.equal(p, q) for other in others for p, q in zip(first, other, strict=True))
    assert first[0].eq(first[0][0, 0]).all() and bool(first[3].eq(1.0).all())


def test_ranks_of_which_some_have_no_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the two, one takes all above an eighth of an octave where the other takes what an estimator says."""
    this = threading.local()
    monkeypatch.setattr(agreed_state, "is_fused", lambda device: this.has_kernels)

    def body(rank: int, device: Device) -> str:
        this.has_kernels = rank != 1
        model = nn.Linear(3, 2).to("pretend")
        with pytest.raises(agmerge.RankMismatchError) as refused:
            agmerge.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        return str(refused.value)

    for text in on_devices(3, body):
        assert "kernels on ranks 0, 2; torch's operations on rank 1" in text and "AGMERGE_KERNEL=off" in text
