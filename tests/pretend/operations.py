# SPDX-License-Identifier: Apache-2.0
"""Say of an operation of torch what it would do on an accelerator: launches, bytes, and whether the host waits."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

# What gives memory or another look at it: no kernel runs.
FREE = frozenset({
    "empty_like", "new_empty", "new_empty_strided", "empty_strided", "empty", "detach", "alias", "lift_fresh",
    "_unsafe_view", "_reshape_alias", "resize_", "set_", "is_same_size", "_has_compatible_shallow_copy_type",
})  # fmt: skip
# What gives the host a value, or has a shape that depends on values.
WAITS = frozenset({
    "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim",
    "unique_consecutive", "unique_dim_consecutive", "bincount", "histc",
})  # fmt: skip
# What touches only some of its first argument: as many elements as there are indices.
SPARSE = frozenset({
    "index_select", "gather", "index_add_", "scatter_", "scatter_add_", "index_copy_", "index_put_", "index_fill_",
    "index", "take",
})  # fmt: skip
OVERWRITES = frozenset({"copy_", "fill_", "zero_", "arange", "normal_", "uniform_", "_foreach_copy_", "_foreach_zero_"})
TENSORS_A_LAUNCH = (110, 64, 48, 36, 30)  # of torch's multi-tensor kernels, by how many lists they are given


class Access(NamedTuple):
    """One argument of an operation, or what it returns."""

    tensor: Tensor  # on the host
    reads: bool
    writes: bool
    elements: int  # that are touched


@functools.cache
def name_of(operation: OpOverload) -> str:
    """The name without namespace and overload: ``"index_add_"``."""
    return operation._schema.name.partition("::")[2]


@functools.cache
def is_view(operation: OpOverload) -> bool:
    """Whether the result lies in the memory of the first argument."""
    return operation.is_view or name_of(operation) in ("_unsafe_view", "_reshape_alias", "lift_fresh")


def launches(operation: OpOverload, accesses: Sequence[Access], given: Sequence[Any]) -> int:
    """How many kernels run."""
    name = name_of(operation)
    if operation.is_view or name in FREE or not any(access.elements for access in accesses):
        return 0
    if name.startswith(("_foreach_", "_fused_")):
        lists = [argument for argument in given if isinstance(argument, (list, tuple)) and _has_tensors(argument)]
        most = TENSORS_A_LAUNCH[min(len(lists), len(TENSORS_A_LAUNCH)) - 1]
        return max(-(-len(tensors) // most) for tensors in lists)
    return 1


def waits(operation: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the host waits for the value or the shape of the result. Copies are another matter."""
    name = name_of(operation)
    if name in ("index", "index_put_", "index_put"):
        return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    return name in WAITS


def accesses(
    operation: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Tensor]
) -> list[Access]:
    """What is read and written. ``args``, ``kwargs``, ``results``: as the host's operation has them."""
    name, found = name_of(operation), []
    written = {id(result) for result in results}
    for place, (is_written, argument) in enumerate(_with_writes(operation, args, kwargs)):
        for tensor in _tensors(argument):
            touched = tensor.numel()
            if place == 0 and name in SPARSE:
                touched = min(touched, max((t.numel() for a in args[1:] for t in _tensors(a)), default=touched))
            only_written = is_written and (name in OVERWRITES or name.endswith("_out") or place >= len(args))
            found.append(Access(tensor, not only_written, is_written, touched))
            written.discard(id(tensor))
    found += [Access(result, False, True, result.numel()) for result in results if id(result) in written]
    return found


def _with_writes(operation: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[bool, Any]]:
    writes = _writes(operation)
    for (_, is_written), argument in zip(writes, args, strict=False):
        yield is_written, argument
    by_name = dict(writes)
    for name, argument in kwargs.items():
        yield by_name.get(name, False), argument


@functools.cache
def _writes(operation: OpOverload) -> tuple[tuple[str, bool], ...]:
    """By argument: its name, and whether it is written to."""
    arguments = operation._schema.arguments
    return tuple((one.name, one.alias_info is not None and one.alias_info.is_write) for one in arguments)


def _tensors(argument: Any) -> Iterator[Tensor]:
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, (list, tuple)):
        yield from (item for item in argument if isinstance(item, Tensor))


def _has_tensors(argument: Sequence[Any]) -> bool:
    return any(isinstance(item, Tensor) for item in argument)
