# SPDX-License-Identifier: Apache-2.0
"""Tensors that say they lie on ``pretend:0``: each holds one of the host, and every operation on it is written down.

:mod:`pretend.registration` makes the device known to torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from pretend import operations
from pretend.books import place
from pretend.clocks import Memory
from pretend.device import Device, current

PLACE = "pretend:0"


class DeviceTensor(Tensor):
    """Stand for ``host`` on a pretended device."""

    host: Tensor
    owner: Device
    memory: Memory

    @staticmethod
    def __new__(cls, host: Tensor, owner: Device, memory: Memory) -> DeviceTensor:
        tensor: DeviceTensor = Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device(PLACE),
        )
        tensor.host, tensor.owner, tensor.memory = host, owner, memory
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, operation: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return perform(operation, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.host.untyped_storage()

    def tolist(self) -> Any:
        self.owner.wait_on_host("tolist")
        return self.host.tolist()

    def pin_memory(self, device: Any = None) -> Tensor:
        raise RuntimeError("cannot pin a tensor of a device")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.host!r})"


def put(host: Tensor, device: Device) -> DeviceTensor:
    """Return a tensor of ``device`` that is ``host``, without a copy."""
    return DeviceTensor(host, device, device.allocate(host))


def perform(operation: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the host's tensors, write it down, and return what it returns, on its device."""
    known: dict[int, Tensor] = {}  # what was handed in, by the identity of the host's tensor
    host_args = [_down(value, known) for value in args]
    host_kwargs = {key: _down(value, known) for key, value in kwargs.items()}
    owners = {tensor.owner for tensor in known.values() if isinstance(tensor, DeviceTensor)}
    if len(owners) > 1:
        raise AssertionError(f"{operation}: tensors of several ranks' devices")
    device = owners.pop() if owners else current()
    device.use()
    target = host_kwargs.get("device")
    if target is not None:
        host_kwargs["device"] = "cpu"
    host_kwargs.pop("pin_memory", None)
    copy = copy_between(operations.name_of(operation), host_args, host_kwargs, known, target)
    before = copy.target.clone() if copy is not None and copy.target is not None else None
    result = operation(*host_args, **host_kwargs)
    leaves = target is not None and torch.device(target).type == "cpu"
    base = known.get(id(host_args[0])) if operations.is_view(operation) else None
    results = [one for one in (result if isinstance(result, (list, tuple)) else [result]) if isinstance(one, Tensor)]
    for host in results:
        if id(host) not in known:
            memory = base.memory if isinstance(base, DeviceTensor) else device.allocate(host)
            known[id(host)] = host if leaves else DeviceTensor(host, device, memory)
    if device.is_watched:
        accesses = operations.accesses(operation, host_args, host_kwargs, results)
        count = operations.launches(operation, accesses, host_args)
        if count:
            allocations = [getattr(known[id(one.tensor)], "memory", None) for one in accesses]
            device.queue(operations.name_of(operation), count, accesses, allocations)
    if operations.waits(operation, host_args, host_kwargs):
        device.wait_on_host(operations.name_of(operation))
    if copy is not None:
        _finish_copy(device, copy, before, result)
    return _up(result, known)


# Not closures in `perform`: these would refer to themselves, and keep its tensors until the next collection of circles.


def _down(value: Any, known: dict[int, Tensor]) -> Any:
    """Return what the host is handed for ``value``, and remember tensors in ``known``."""
    if isinstance(value, Tensor):
        host = value.host if isinstance(value, DeviceTensor) else value
        known[id(host)] = value
        return host
    return [_down(item, known) for item in value] if isinstance(value, (list, tuple)) else value


def _up(value: Any, known: dict[int, Tensor]) -> Any:
    """Return what stands for the host's result ``value``."""
    if isinstance(value, Tensor):
        return known[id(value)]
    return type(value)(_up(one, known) for one in value) if isinstance(value, (list, tuple)) else value


class HostCopy(NamedTuple):
    """A copy between host and device."""

    name: str  # of the operation
    source: Tensor | None  # the host's memory that is read
    target: Tensor | None  # the host's memory that is written; None with `source` None: memory that is made for it
    non_blocking: bool


def copy_between(
    name: str, args: Sequence[Any], kwargs: dict[str, Any], known: dict[int, Tensor], device: Any
) -> HostCopy | None:
    """What an operation copies between host and device; None: nothing. Arguments as the host's operation has them."""
    non_blocking = bool(kwargs.get("non_blocking"))
    if name == "_to_copy":
        goes = device is not None and torch.device(device).type == "cpu"
        return HostCopy(name, None, None, non_blocking) if goes else None
    if name != "copy_" or not args[0].numel():
        return None
    target, source = (None if isinstance(known[id(tensor)], DeviceTensor) else tensor for tensor in args[:2])
    if target is None and source is None:
        return None
    return HostCopy(name, source, target, non_blocking or (len(args) > 2 and bool(args[2])))


def _finish_copy(device: Device, copy: HostCopy, before: Tensor | None, result: Tensor) -> None:
    """Wait for a copy, or let it come later: non_blocking, from or to pinned memory."""
    made = copy.source is None and copy.target is None
    if made:
        device.pinned.adopt(result)  # torch pins what it makes for a copy that need not wait
        before = torch.zeros_like(result)
    ours = copy.source if copy.source is not None else result
    if not copy.non_blocking or ours not in device.pinned:
        device.wait_on_host(copy.name)
    elif copy.source is not None:
        device.pinned.leaving(ours, dict(device.stream.clock), place().line)
    else:
        assert before is not None
        device.pinned.arriving(ours, before, dict(device.stream.clock), place().line)
