# SPDX-License-Identifier: Apache-2.0
"""A backward pass that is captured in a graph: its replays run no hooks, so it is refused, by name."""

from __future__ import annotations

import pytest
import torch
from pretend.device import Device
from pretend.tensors import PLACE
from pretend.training import on_devices

import agmerge
from agmerge.engine import grad_hooks


def test_a_captured_gradient_is_an_error_that_names_graphs() -> None:
    """The hook is called by itself: what it raises on the pretended device's own thread ends the process."""

    def body(rank: int, device: Device) -> None:
        heard: list[torch.Tensor] = []
        parameter = torch.zeros(2, device=PLACE)
        hook = grad_hooks._on_device(heard.append, "a.weight")
        with (
            device.capturing(),
            pytest.raises(agmerge.AGMergeError, match="'a.weight' is being captured in a CUDA graph"),
        ):
            hook(parameter)
        assert heard == []
        hook(parameter)
        assert len(heard) == 1

    on_devices(1, body)
