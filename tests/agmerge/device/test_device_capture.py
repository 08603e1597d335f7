# SPDX-License-Identifier: Apache-2.0
"""Hooks on gradients of devices: a backward pass that is captured in a graph is refused, and none is slowed down."""

from __future__ import annotations

import weakref

import pytest
import torch
from pretend import streams
from pretend.device import Device
from pretend.tensors import PLACE
from pretend.training import on_devices

import agmerge
from agmerge.backends.streams import streams_of
from agmerge.engine import grad_hooks


class Listener:
    """Counts what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_gradient(self, parameter: torch.Tensor, name: str) -> None:
        self.heard.append(name)


def test_no_hook_goes_through_the_wrapper_of_dynamo_in_an_eager_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs it took half of a hook."""

    def wrapper(fn: object) -> object:
        def apart(*_: object) -> None:
            raise AssertionError("the wrapper was called")

        return apart

    monkeypatch.setattr(grad_hooks, "_disable_dynamo", wrapper)
    listener, parameter = Listener(), torch.zeros(2)
    for kind in (None, streams.DeviceStreams()):
        hook = grad_hooks._hook(weakref.ref(listener), "a.weight", kind)
        on_devices(1, lambda rank, device, hook=hook: hook(parameter))
    assert listener.heard == ["a.weight"] * 2


def test_a_captured_gradient_is_an_error_that_names_graphs() -> None:
    """The hook is called by itself: what it raises on the pretended device's own thread ends the process."""

    def body(rank: int, device: Device) -> None:
        listener, parameter = Listener(), torch.zeros(2, device=PLACE)
        hook = grad_hooks._hook(weakref.ref(listener), "a.weight", streams_of(parameter.device))
        with (
            device.capturing(),
            pytest.raises(agmerge.AGMergeError, match="AGM114: .* 'a.weight' .* CUDA graph"),
        ):
            hook(parameter)
        assert listener.heard == []
        hook(parameter)
        assert listener.heard == ["a.weight"]

    on_devices(1, body)
