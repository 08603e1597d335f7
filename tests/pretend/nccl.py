# SPDX-License-Identifier: Apache-2.0
"""Collectives of a pretended device, as NCCL makes them: queued without waiting; ``wait`` with a time-out waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from agmerge.backends import Backend, Handle
from pretend.books import COLLECTIVE
from pretend.clocks import Clock
from pretend.device import Device
from pretend.operations import Access
from pretend.tensors import DeviceTensor


class Turn:
    """Let one rank run at a time: threads that all want Python's lock take several times as long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Be the one that runs."""
        with self._lock:
            yield

    @contextmanager
    def given_away(self) -> Iterator[None]:
        """Let others run, inside of :meth:`taken`."""
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()


class DeviceHandle(Handle):
    """Follow a collective of the in-memory group.

    ``clock``: when it has ended on the device; empty: it is the host's. ``tensors``: of the device, that it reads and
    writes; kept until somebody has waited. ``turn``: held by this rank.
    """

    def __init__(
        self, inner: Handle, device: Device, name: str, clock: Clock, tensors: Sequence[Tensor], turn: Turn
    ) -> None:
        super().__init__(name, inner._ranks)
        self._inner, self._device, self._clock, self._tensors, self._turn = inner, device, clock, tensors, turn

    def done(self) -> bool:
        return self._inner.done()

    def _wait(self, timeout: float) -> None:
        """Wait as NCCL does that is given a time-out: the host looks every millisecond until it has ended."""
        self._let_others(timeout)
        self._device.wait_on_host("Handle.wait", self._clock)
        self._tensors = ()

    def wait_on_stream(self, timeout: float) -> None:
        """Let the current stream wait. (The values are here at once, since the host computes them.)"""
        self._let_others(timeout)
        self._device.wait(self._device.stream, self._clock)
        self._tensors = ()

    def _let_others(self, timeout: float) -> None:
        if self._inner.done():
            self._inner._wait(timeout)
        else:
            with self._turn.given_away():
                self._inner._wait(timeout)


class DeviceBackend(Backend):
    """Run collectives of ``inner``, an in-memory group's, on tensors of ``device``; those of the host as they are.

    They have ended when all ranks have called them: :mod:`pretend.process_groups` is stricter.
    """

    name = "pretend"

    def __init__(self, inner: Backend, device: Device, turn: Turn) -> None:
        self._inner, self._device, self._turn = inner, device, turn
        self._stream = device.new_stream("nccl")
        self.rank, self.size = inner.rank, inner.size
        self.local_rank, self.local_size = inner.local_rank, inner.local_size

    def _started(self, handle: Handle, name: str, *tensors: Tensor) -> Handle:
        ours = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
        if not ours:
            return DeviceHandle(handle, self._device, name, {}, (), self._turn)
        self._stream.wait(self._device.stream.clock)
        with self._device.within(self._stream):
            # The first is what arrives. It may be what is sent, too.
            accesses = [Access(one.host, one is ours[-1], one is ours[0], one.numel()) for one in ours]
            self._device.queue(COLLECTIVE, 1, accesses, [one.memory for one in ours])
        return DeviceHandle(handle, self._device, name, dict(self._stream.clock), ours, self._turn)

    def all_reduce(self, tensor: Tensor, name: str, op: str = "sum") -> Handle:
        return self._started(self._inner.all_reduce(_host(tensor), name, op), name, tensor)

    def all_gather(self, out: Tensor, tensor: Tensor, name: str) -> Handle:
        return self._started(self._inner.all_gather(_host(out), _host(tensor), name), name, out, tensor)

    def all_to_all(
        self, out: Tensor, tensor: Tensor, out_splits: Sequence[int], splits: Sequence[int], name: str
    ) -> Handle:
        handle = self._inner.all_to_all(_host(out), _host(tensor), out_splits, splits, name)
        return self._started(handle, name, out, tensor)

    def reduce_scatter(self, out: Tensor, tensor: Tensor, name: str) -> Handle:
        return self._started(self._inner.reduce_scatter(_host(out), _host(tensor), name), name, out, tensor)

    def broadcast(self, tensor: Tensor, root: int, name: str) -> Handle:
        return self._started(self._inner.broadcast(_host(tensor), root, name), name, tensor)

    def barrier(self, name: str) -> Handle:
        return self._started(self._inner.barrier(name), name)

    def duplicate(self, label: str, timeout: float) -> Backend:
        return DeviceBackend(self._inner.duplicate(label, timeout), self._device, self._turn)

    def subgroup(self, ranks: Sequence[int], label: str, timeout: float) -> Backend | None:
        inner = self._inner.subgroup(ranks, label, timeout)
        return None if inner is None else DeviceBackend(inner, self._device, self._turn)

    def over(self, process_set: Any) -> Backend | None:
        return self._inner.over(process_set)

    def drop(self) -> None:
        self._inner.drop()

    def close(self) -> None:
        self._inner.close()


def _host(tensor: Tensor) -> Tensor:
    return tensor.host if isinstance(tensor, DeviceTensor) else tensor
