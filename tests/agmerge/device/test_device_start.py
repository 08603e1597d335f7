"""What ranks start with on devices: rank 0's parameters and optimizer state."""

from __future__ import annotations

import torch
from pretend.device import Device
from pretend.training import on_devices
from support.device_training import host
from torch import nn

import agmerge


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
