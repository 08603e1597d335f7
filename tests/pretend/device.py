"""Tensors that say they lie on ``pretend:0``: each holds one of the host, and every operation on it is written down.

torch's PrivateUse1 hooks give the CPU build a device guard and a device thread in autograd. There is one such device in
a process; ranks that are threads have a :class:`Device` each, which knows its own tensors. A tensor made from nothing
belongs to the device that its thread used last (:meth:`Device.use`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import backend_registration

from pretend import operations
from pretend.books import Books

NAME = "pretend"
PLACE = f"{NAME}:0"

_thread = threading.local()  # .device: whose tensors this thread made or touched last


class Device:
    """Be one rank's accelerator: what is asked of it is written into ``books``."""

    def __init__(self) -> None:
        install()
        self.books = Books()
        self._pinned: dict[int, Tensor] = {}  # memory of the host that copies need not wait for, by its address

    def use(self) -> None:
        """Let this thread make its tensors here."""
        _thread.device = self

    def put(self, host: Tensor) -> DeviceTensor:
        """Return a tensor of this device that is ``host``, without a copy."""
        return DeviceTensor(host, self)

    def pinned(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return memory of the host that copies of this device do not wait for, 1-D."""
        tensor = torch.zeros(size, dtype=dtype)
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in such memory."""
        return tensor.untyped_storage().data_ptr() in self._pinned


def current() -> Device:
    """The device of this thread."""
    device: Device = _thread.device
    return device


class DeviceTensor(Tensor):
    """Stand for ``host`` on a pretended device."""

    host: Tensor
    owner: Device

    @staticmethod
    def __new__(cls, host: Tensor, owner: Device) -> DeviceTensor:
        tensor: DeviceTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=PLACE,
        )
        tensor.host, tensor.owner = host, owner
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
        self.owner.books.waited("tolist")
        return self.host.tolist()

    def pin_memory(self, device: Any = None) -> Tensor:
        raise RuntimeError("cannot pin a tensor of a device")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.host!r})"


def perform(operation: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the host's tensors, write it down, and return what it returns, on its device."""
    known: dict[int, Tensor] = {}  # what was handed in, by the identity of the host's tensor
    owners: set[Device] = set()

    def down(value: Any) -> Any:
        if isinstance(value, DeviceTensor):
            owners.add(value.owner)
            known[id(value.host)] = value
            return value.host
        if isinstance(value, Tensor):
            known[id(value)] = value
        return [down(item) for item in value] if isinstance(value, (list, tuple)) else value

    host_args, host_kwargs = [down(value) for value in args], {key: down(value) for key, value in kwargs.items()}
    if len(owners) > 1:
        raise AssertionError(f"{operation}: tensors of several ranks' devices")
    device = owners.pop() if owners else current()
    device.use()
    target = kwargs.get("device")
    if target is not None:
        host_kwargs["device"] = "cpu"
    host_kwargs.pop("pin_memory", None)
    result = operation(*host_args, **host_kwargs)
    results = [result] if isinstance(result, Tensor) else [one for one in _flat(result) if isinstance(one, Tensor)]
    leaves = target is not None and torch.device(target).type == "cpu"
    _write_down(device, operation, host_args, host_kwargs, results, known, leaves)
    return _up(result, known, (lambda host: host) if leaves else device.put)


def _flat(result: Any) -> Sequence[Any]:
    return result if isinstance(result, (list, tuple)) else []


def _up(result: Any, known: dict[int, Tensor], wrap: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(result, Tensor):
        return known[id(result)] if id(result) in known else wrap(result)
    if isinstance(result, (list, tuple)):
        return type(result)(_up(one, known, wrap) for one in result)
    return result


def _write_down(
    device: Device,
    operation: OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    results: Sequence[Tensor],
    known: dict[int, Tensor],
    leaves: bool,
) -> None:
    """``args``, ``kwargs``, ``results``: the host's. ``known``: what was handed in. ``leaves``: the result is the
    host's."""
    name = operations.name_of(operation)
    accesses = operations.accesses(operation, args, kwargs, results)
    count = operations.launches(operation, accesses, args)
    if count:
        size = sum(one.elements * one.tensor.element_size() * (one.reads + one.writes) for one in accesses)
        device.books.launched(name, count, size)
    if operations.waits(operation, args, kwargs) or _copy_waits(device, name, args, kwargs, known, leaves):
        device.books.waited(name)


def _copy_waits(
    device: Device, name: str, args: Sequence[Any], kwargs: dict[str, Any], known: dict[int, Tensor], leaves: bool
) -> bool:
    """Whether a copy between host and device waits: unless it is non_blocking, and the host's memory pinned."""
    if name == "_to_copy":
        # torch pins what it makes for a copy that need not wait.
        return leaves and not kwargs.get("non_blocking")
    if name not in ("copy_", "_copy_from") or not args[0].numel():
        return False
    ours = [tensor for tensor in args[:2] if not isinstance(known[id(tensor)], DeviceTensor)]
    non_blocking = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
    return any(not (non_blocking and device.is_pinned(tensor)) for tensor in ours)


_installing = threading.Lock()
_library: torch.library.Library | None = None  # keeps what is registered; written by install alone


def install() -> None:
    """Make the device known to torch, once in a process."""
    global _library
    with _installing:
        if _library is not None:
            return
        backend_registration._setup_privateuseone_for_python_backend(NAME)
        _library = torch.library.Library("aten", "IMPL", "PrivateUse1")
        for name in (
            "empty.memory_format", "empty_strided", "arange", "arange.start", "arange.start_step",
        ):  # fmt: skip
            _library.impl(name, _factory(name))
        _library.impl("_copy_from", _copy_from)


def _factory(name: str) -> Callable[..., Tensor]:
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def make(*args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = perform(operation, args, {**kwargs, "device": PLACE})
        return result

    return make


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    result: Tensor = perform(torch.ops.aten.copy_.default, (target, source, non_blocking), {})
    return result
