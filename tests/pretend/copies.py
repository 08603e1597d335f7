# SPDX-License-Identifier: Apache-2.0
"""Copies between a pretended device and the host that are made late, as a device with other work makes them."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from agmerge.backends.staging import Copies
from pretend.tensors import DeviceTensor

UNTOUCHED = 119  # of every byte of a twin: what is sent too early shows


class LateCopies(Copies):
    """Queue copies; ``run_one`` makes the next one. ``queued``: how many were asked for so far."""

    def __init__(self) -> None:
        self.queued = 0
        self._queue: queue.SimpleQueue[tuple[Tensor, Tensor, threading.Event] | None] = queue.SimpleQueue()

    def twin(self, tensor: Tensor) -> Tensor:
        size = tensor.numel() * tensor.element_size()
        return torch.full((size,), UNTOUCHED, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)

    def stream(self, tensor: Tensor) -> Any:
        return "current"

    def copy(self, to: Tensor, source: Tensor, device: torch.device, stream: Any) -> threading.Event:
        assert stream == "current" and device in (to.device, source.device)
        made = threading.Event()
        self.queued += 1
        self._queue.put((to, source, made))
        return made

    def wait_on_host(self, device: torch.device, event: threading.Event) -> None:
        assert event.wait(30), "a copy was never made"

    def join(self, tensor: Tensor, event: threading.Event) -> None:
        self.wait_on_host(tensor.device, event)  # what is queued on a pretended device runs at once

    def run_one(self) -> bool:
        """Make the next copy, waiting until one is asked for; return False at the end."""
        asked = self._queue.get()
        if asked is not None:
            to, source, made = asked
            _host(to).copy_(_host(source))
            made.set()
        return asked is not None

    @contextmanager
    def running(self, seed: int = 0) -> Iterator[LateCopies]:
        """Make every copy after up to a millisecond."""
        pauses = random.Random(seed)

        def run() -> None:
            while self.run_one():
                time.sleep(pauses.random() / 1000)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield self
        self._queue.put(None)
        thread.join()


def _host(tensor: Tensor) -> Tensor:
    return tensor.host if isinstance(tensor, DeviceTensor) else tensor
