"""A backward pass that is captured in a graph: its replays run no hooks, so it is refused, by name."""

from __future__ import annotations

import weakref

import pytest
import torch
from pretend.device import Device
from pretend.tensors import PLACE
from pretend.training import on_devices

import agmerge
from agmerge.engine import grad_hooks


class Listener:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_gradient(self, parameter: torch.Tensor, name: str) -> None:
        self.heard.append(name)


def test_a_captured_gradient_is_an_error_that_names_graphs() -> None:
    """The hook is called by itself: what it raises on the pretended device's own thread ends the process."""

    def body(rank: int, device: Device) -> None:
        listener, parameter = Listener(), torch.zeros(2, device=PLACE)
        hook = grad_hooks._hook(weakref.ref(listener), "a.weight")
        with (
            device.capturing(),
            pytest.raises(agmerge.AGMergeError, match="'a.weight' is being captured in a CUDA graph"),
        ):
            hook(parameter)
        assert listener.heard == []
        hook(parameter)
        assert listener.heard == ["a.weight"]

    on_devices(1, body)
