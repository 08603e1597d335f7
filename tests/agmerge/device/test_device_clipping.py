# SPDX-License-Identifier: Apache-2.0
"""Clipping on a device is noticed some steps late, for nothing waits for it (limits: test_device_limits.py)."""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch
from pretend.device import Device
from pretend.tensors import PLACE
from pretend.training import on_devices
from support.device_training import Given, wrapped

BOUND = 1.0


def clip(model: Given, bound: float) -> None:
    """Written out: by operations that a pretended device has."""
    gradients = [parameter.grad for parameter in model.parameters()]
    norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
    factor = (bound / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)


def trained(bound: float, **options: Any) -> list[str]:
    """What is said on each rank in the step that raises."""

    def body(rank: int, device: Device) -> str:
        model = Given(PLACE)
        optimizer = wrapped(model, **options)
        for step in range(10):
            optimizer.zero_grad()
            model(rank, step).backward()
            optimizer.synchronize()
            clip(model, bound)
            try:
                with optimizer.skip_synchronize():
                    optimizer.step()
            except ValueError as error:
                return f"{step}: {error}"
        return ""

    return on_devices(2, body, watched=())


def test_a_clipped_velocity_is_the_same_error_on_all_ranks() -> None:
    said = trained(BOUND, compression="dgc", exchange="sparse")
    assert said[0] == said[1] and re.match("[2-4]: ", said[0]) and "velocity" in said[0]
    assert trained(1e6, compression="dgc", exchange="sparse") == ["", ""]


def test_a_selection_is_worth_one_warning() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert trained(BOUND, compression="topk", exchange="sparse") == ["", ""]
    assert len([one for one in caught if "AGM125" in str(one.message)]) == 1
