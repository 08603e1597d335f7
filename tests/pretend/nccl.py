"""Collectives of a pretended device, as NCCL makes them: queued without waiting; ``wait`` with a time-out waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from agmerge.backends import Backend, Handle
from pretend.books import COLLECTIVE
from pretend.device import Device, DeviceTensor


class DeviceHandle(Handle):
    """Follow a collective of the in-memory group on tensors of a device."""

    def __init__(self, inner: Handle, device: Device, name: str) -> None:
        super().__init__(name, inner._ranks)
        self._inner, self._device = inner, device

    def done(self) -> bool:
        return self._inner.done()

    def _wait(self, timeout: float) -> None:
        self._device.books.waited("Handle.wait")
        self._inner._wait(timeout)


class DeviceBackend(Backend):
    """Run collectives of ``inner``, an in-memory group's, on tensors of ``device``; those of the host as they are."""

    name = "pretend"

    def __init__(self, inner: Backend, device: Device) -> None:
        self._inner, self._device = inner, device
        self.rank, self.size = inner.rank, inner.size
        self.local_rank, self.local_size = inner.local_rank, inner.local_size

    def _started(self, handle: Handle, name: str, *tensors: Tensor) -> Handle:
        ours = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
        if not ours:
            return handle
        self._device.books.launched(COLLECTIVE, 1, sum(tensor.numel() * tensor.element_size() for tensor in ours))
        return DeviceHandle(handle, self._device, name)

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
        return self._inner.barrier(name)

    def duplicate(self, label: str, timeout: float) -> Backend:
        return DeviceBackend(self._inner.duplicate(label, timeout), self._device)

    def subgroup(self, ranks: Sequence[int], label: str, timeout: float) -> Backend | None:
        inner = self._inner.subgroup(ranks, label, timeout)
        return None if inner is None else DeviceBackend(inner, self._device)

    def over(self, process_set: Any) -> Backend | None:
        return self._inner.over(process_set)

    def drop(self) -> None:
        self._inner.drop()

    def close(self) -> None:
        self._inner.close()


def _host(tensor: Tensor) -> Tensor:
    return tensor.host if isinstance(tensor, DeviceTensor) else tensor
