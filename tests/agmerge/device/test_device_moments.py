# SPDX-License-Identifier: Apache-2.0
"""Moments on a device have the values that they have on the host, and the host waits for nothing but copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pretend.device import Device
from pretend.tensors import PLACE, put
from torch import Tensor, nn

from agmerge.updates.moment_scales import MomentScales
from agmerge.updates.moments import OptimizerMoments

NUMELS = {"a": 5000, "b": 40, "c": 0}


def values(seed: int, name: str) -> Tensor:
    return torch.randn(NUMELS[name], generator=torch.Generator().manual_seed(seed))


def test_ratios(device: Device) -> None:
    on_host, on_device = MomentScales(NUMELS), MomentScales(NUMELS)
    vectors = []
    for step in range(4):
        out, its_out = torch.empty(on_host.length), put(torch.empty(on_host.length), device)
        given = {"a": values(step, "a"), "b": values(step, "b")}
        on_host.measure(given, step, out, 8.0)
        its_own = {name: put(value.clone(), device) for name, value in given.items()}
        scale = put(torch.tensor(8.0), device)
        device.books.clear()
        on_device.measure(its_own, step, its_out, scale)
        assert device.books.waits == []
        vectors.append((out, its_out))
    for i in (0, 2):
        mean = (vectors[i][0] + vectors[i + 1][0]) / 2
        its_mean = (vectors[i][1] + vectors[i + 1][1]) / 2
        on_host.take(mean, 2)
        device.books.clear()
        on_device.take(its_mean, 2)
        assert device.books.waits == []
        assert on_device.measured("a") == on_host.measured("a") and on_device.overall == on_host.overall
    assert on_device.state().equal(on_host.state()) and 0 < (on_host.measured("a") or 0) < 0.9
    assert device.books.races == []


def an_adam(of: Any, where: Any) -> tuple[torch.optim.Optimizer, nn.Parameter]:
    """An Adam after some steps, with its rate and its number of steps where ``where`` puts them, as if capturable."""
    parameter = nn.Parameter(of(values(0, "b")))
    optimizer = torch.optim.Adam([parameter], lr=0.1, weight_decay=0.1)
    optimizer.param_groups[0]["lr"] = where(torch.tensor(0.1))
    optimizer.state[parameter].update(
        step=where(torch.tensor(3.0)), exp_avg=of(values(1, "b")), exp_avg_sq=of(values(2, "b").square())
    )
    parameter.grad = of(values(3, "b") * 16)
    return optimizer, parameter


@pytest.mark.parametrize("overflows", [False, True])
def test_second_moments_of_a_scaled_step(device: Device, overflows: bool) -> None:
    states = []
    for to in (lambda tensor: tensor, lambda tensor: put(tensor, device)):
        optimizer, parameter = an_adam(to, to)
        if overflows:
            parameter.grad = to(torch.full((40,), torch.inf))
        before = optimizer.state[parameter]["exp_avg_sq"].cpu().clone()
        scale, found = to(torch.tensor(16.0)), to(torch.tensor(float(overflows)))
        device.books.clear()
        OptimizerMoments(optimizer).before_step(lambda _: 0.5, scale, found)
        assert device.books.waits == []
        states.append(optimizer.state[parameter]["exp_avg_sq"].cpu())
        assert states[-1].equal(before) == overflows
    assert states[0].equal(states[1])


def test_a_momentum_that_follows(device: Device) -> None:
    states = []
    for to in (lambda tensor: tensor, lambda tensor: put(tensor, device)):
        optimizer, parameter = an_adam(to, to)
        moments = OptimizerMoments(optimizer)
        device.books.clear()
        departed = moments.departing()
        assert device.books.waits == []
        moments.before_step(lambda _: None)
        optimizer.state[parameter]["step"].add_(1)  # as the next step does
        optimizer.param_groups[0]["lr"].fill_(7.0)
        moved = to(values(9, "b")[:30].clone())
        momentum = departed.momentum(parameter, 2)
        assert momentum is not None
        momentum.follow(slice(5, 35), moved)
        states.append(optimizer.state[parameter]["exp_avg"].cpu())
    torch.testing.assert_close(states[1], states[0], rtol=1e-6, atol=0)
    assert not states[0].equal(values(1, "b")) and device.books.races == []
    assert str(put(torch.zeros(1), device).device) == PLACE
