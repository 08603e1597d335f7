# SPDX-License-Identifier: Apache-2.0
"""Stand for a link to workers that are not there: messages of a world of one take the time that they would on it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from agmerge.backends import Backend, Handle
from device.gpu_bench import Bench

CLOCK = 1.0e9  # cycles a second of a spinning kernel, before the first measurement


class LinkHandle(Handle):
    """Wait for a message: the current stream does, not the host."""

    def __init__(self, inner: Handle, name: str, event: Any) -> None:
        super().__init__(name)
        self._inner, self._event = inner, event

    def done(self) -> bool:
        return self._inner.done() and (self._event is None or self._event.query())

    def wait_on_stream(self, timeout: float) -> None:
        self._inner.wait_on_stream(timeout)
        self._follow()

    def _wait(self, timeout: float) -> None:
        self._inner.wait(timeout)
        self._follow()

    def _follow(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class Link(Backend):
    """Let messages of ``inner`` travel one after the other, at ``bandwidth`` bytes a second, on a stream of their own.

    ``sent``: of each message, the event at which it was ready and its seconds; none on the CPU.
    """

    def __init__(self, inner: Backend, bandwidth: float, bench: Bench) -> None:
        self._inner, self._bandwidth, self._device = inner, bandwidth, bench.device
        self.name, self.rank, self.size = inner.name, inner.rank, inner.size
        self.local_rank, self.local_size = inner.local_rank, inner.local_size
        self.sent: list[tuple[Any, float]] = []
        self._stream = torch.cuda.Stream(bench.device) if bench.is_gpu else None
        self._cycles = cycles_a_second() if bench.is_gpu else CLOCK

    def _on_the_way(self, handle: Handle, name: str, tensor: Tensor) -> Handle:
        seconds = tensor.numel() * tensor.element_size() / self._bandwidth
        if self._stream is None or tensor.device != self._device:
            return handle
        ready = torch.cuda.Event(enable_timing=True)
        ready.record()
        self.sent.append((ready, seconds))
        self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(int(seconds * self._cycles))
            arrived = torch.cuda.Event()
            arrived.record()
        return LinkHandle(handle, name, arrived)

    def all_reduce(self, tensor: Tensor, name: str, op: str = "sum") -> Handle:
        return self._on_the_way(self._inner.all_reduce(tensor, name, op), name, tensor)

    def all_gather(self, out: Tensor, tensor: Tensor, name: str) -> Handle:
        return self._on_the_way(self._inner.all_gather(out, tensor, name), name, tensor)

    def all_to_all(
        self, out: Tensor, tensor: Tensor, out_splits: Sequence[int], splits: Sequence[int], name: str
    ) -> Handle:
        return self._on_the_way(self._inner.all_to_all(out, tensor, out_splits, splits, name), name, tensor)

    def reduce_scatter(self, out: Tensor, tensor: Tensor, name: str) -> Handle:
        return self._on_the_way(self._inner.reduce_scatter(out, tensor, name), name, tensor)

    def broadcast(self, tensor: Tensor, root: int, name: str) -> Handle:
        return self._on_the_way(self._inner.broadcast(tensor, root, name), name, tensor)

    def barrier(self, name: str) -> Handle:
        return self._inner.barrier(name)

    def duplicate(self, label: str, timeout: float) -> Backend:
        return self  # of one rank: nothing can be mixed up, and all that is sent is seen here

    def subgroup(self, ranks: Sequence[int], label: str, timeout: float) -> Backend | None:
        return self

    def close(self) -> None:
        return


def cycles_a_second() -> float:
    """Return how fast a spinning kernel counts, measured."""
    torch.cuda._sleep(int(CLOCK / 100))
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.cuda._sleep(int(CLOCK / 10))
    torch.cuda.synchronize()
    return CLOCK / 10 / (time.perf_counter() - start)
