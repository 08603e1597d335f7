"""Let a pretended device have kernels: a call of ``sparsifiers.gpu`` is the launches and bytes that it says.

What it computes is computed by its reference, in torch's operations of which none is counted.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from pretend.operations import Access
from pretend.tensors import NAME, DeviceTensor
from sparsifiers.gpu import choice


class Fused(NamedTuple):
    """Say what stands for a kernel, and what that is on a GPU (docs/gpu.md, "Kernels")."""

    module: str  # of sparsifiers.gpu
    reference: str  # the function in torch's operations
    launches: int
    writes: tuple[str, ...]  # parameters, or fields of them, whose tensors are written; all others are read
    bytes: Callable[[dict[str, Any]], float]  # of device memory moved, from the arguments


def elements(arguments: dict[str, Any], name: str) -> int:
    """The elements of a tensor among the arguments."""
    return int(arguments[name].numel())


TABLE = (
    Fused("compensation", "reference", 1, ("work", "scratch"), lambda a: 12 * elements(a, "work")),
    Fused("edge", "count_digits_reference", 1, ("scratch",), lambda a: 4 * elements(a, "work")),
    Fused("edge", "find_edge_reference", 1, ("scratch",), lambda a: 16_384),
    Fused("compact", "mark_reference", 1, ("scratch",), lambda a: 4.25 * elements(a, "work")),
    Fused(
        "compact",
        "gather_reference",
        2,
        ("work", "slots", "scratch", "momentum", "clear"),
        lambda a: 0.25 * elements(a, "work") + 24 * a["slots"].indices.numel(),
    ),
    Fused("compact", "commit_reference", 1, ("work", "momentum"), lambda a: 16 * a["slots"].indices.numel()),
    Fused("rows", "reference", 2, ("scratch",), lambda a: 20 * elements(a, "work")),
    Fused("codec", "encode_reference", 1, ("words",), lambda a: 12 * elements(a, "indices")),
    Fused("codec", "decode_reference", 2, ("out", "wrong"), lambda a: 14 * elements(a, "out")),
    Fused("whole", "reference", 1, ("update",), lambda a: 4 * elements(a, "update") + 4 * elements(a, "rows")),
    Fused("add", "reference", 1, ("update",), lambda a: 4 * elements(a, "update") + 18 * elements(a, "values")),
)


@contextmanager
def installed() -> Iterator[None]:
    """Let pretended devices have kernels, inside."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "FUSED", choice.FUSED | {NAME})
        for fused in TABLE:
            module = importlib.import_module(f"sparsifiers.gpu.{fused.module}")
            patch.setattr(module, fused.reference, counted(getattr(module, fused.reference), fused))
        yield


def counted(reference: Callable[..., None], fused: Fused) -> Callable[..., None]:
    """``reference``, written down as the kernels that it stands for."""
    signature = inspect.signature(reference)

    @functools.wraps(reference)
    def call(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        named = dict(tensors(bound.arguments))
        device = next((tensor.owner for tensor in named.values()), None)
        if device is None or not device.is_watched:  # within another one, or not a device that is looked at
            reference(*args, **kwargs)
            return
        with device.unwatched():
            reference(*args, **kwargs)
        accesses = [
            Access(tensor.host, True, name.partition(".")[0] in fused.writes, tensor.numel())
            for name, tensor in named.items()
        ]
        size = round(fused.bytes(bound.arguments))
        memory = [tensor.memory for tensor in named.values()]
        device.queue(fused.reference, fused.launches, accesses, memory, size)

    return call


def tensors(values: dict[str, Any]) -> Iterator[tuple[str, DeviceTensor]]:
    """The tensors of the device among arguments, by name, those in sequences and in fields with a dot and more."""
    for name, value in values.items():
        if isinstance(value, DeviceTensor):
            yield name, value
        elif isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            yield from ((f"{name}.{i}", one) for i, one in enumerate(value) if isinstance(one, DeviceTensor))
        elif hasattr(value, "__dataclass_fields__") or hasattr(value, "_fields"):
            fields = getattr(value, "_fields", None) or list(value.__dataclass_fields__)
            parts = ((f"{name}.{field}", getattr(value, field)) for field in fields)
            yield from (
                (place, part) for place, part in parts if isinstance(part, Tensor) and isinstance(part, DeviceTensor)
            )
