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

from agmerge.backends.staging import Copies, Event
from pretend.device import DeviceTensor

UNTOUCHED = 119  # of every byte of a twin: what is sent too early shows


class Moment(threading.Event):
    """Stand for the end of a copy."""

    def synchronize(self) -> None:
        """Let the host wait for it."""
        assert self.wait(30), "a copy was never made"


class LateCopies(Copies):
    """Queue copies; ``run_one`` makes the next one. ``queued``: how many were asked for so far."""

    def __init__(self) -> None:
        self.queued = 0
        self._queue: queue.SimpleQueue[tuple[Tensor, Tensor, Moment] | None] = queue.SimpleQueue()

    def twin(self, tensor: Tensor) -> Tensor:
        assert isinstance(tensor, DeviceTensor)
        bytes_ = tensor.owner.pinned(tensor.numel() * tensor.element_size(), torch.uint8).fill_(UNTOUCHED)
        return bytes_.view(tensor.dtype).view(tensor.shape)

    def stream(self, tensor: Tensor) -> Any:
        return "current"

    def copy(self, to: Tensor, source: Tensor, stream: Any) -> Event:
        assert stream == "current"
        moment = Moment()
        self.queued += 1
        self._queue.put((to, source, moment))
        return moment

    def join(self, tensor: Tensor, event: Event) -> None:
        event.synchronize()  # what is queued on a pretended device runs at once

    def run_one(self) -> bool:
        """Make the next copy, waiting until one is asked for; return False at the end."""
        asked = self._queue.get()
        if asked is not None:
            to, source, moment = asked
            to.copy_(source, non_blocking=True)
            moment.set()
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
