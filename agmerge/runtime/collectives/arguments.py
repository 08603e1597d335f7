# SPDX-License-Identifier: Apache-2.0
"""Check what scripts pass to a collective. ``ValueError`` and ``TypeError`` say what to pass instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from agmerge.errors import AGMergeError
from agmerge.ops import Average, ReduceOp, Sum
from agmerge.runtime import horovod_names

OPS = "agmerge.Average, Sum, Min, Max or Product"


class Compressor(Protocol):
    """Cast for tensors that travel, as :class:`agmerge.Compression` or one of Horovod's."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor that travels in place of ``tensor``, and a context."""

    def decompress(self, tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """Return ``tensor`` in its old dtype, with the loss of the cast. ``context``: the one of ``compress``."""


def label(name: Any, call: str) -> str:
    """Return the name of a call in errors: the script's name for it, or its own."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"{call}: name must be a string, got {name!r}")
    return name or call


def check_tensor(given: Any, call: str) -> None:
    """Raise unless ``given`` is a dense tensor."""
    if given is None:
        raise TypeError(
            f"{call}: the tensor is None (is it the gradient of a parameter that this rank did not use?). Pass a "
            "tensor on every rank, with zeros if the rank has no values."
        )
    if not isinstance(given, torch.Tensor):
        hint = "grouped_allreduce for lists, " if isinstance(given, (list, tuple)) else ""
        raise TypeError(
            f"{call}: expected a tensor, got {type(given).__name__}. Use {hint}torch.tensor() for numbers, and "
            "allgather_object or broadcast_object for other objects."
        )
    if given.layout is not torch.strided:
        raise ValueError(
            f"{call}: a tensor of layout {given.layout} is not supported. Pass tensor.to_dense(), or use "
            "sparse_allreduce_async."
        )


def check_list(given: Any, call: str) -> list[torch.Tensor]:
    """Return the tensors of a grouped call."""
    if isinstance(given, torch.Tensor) or not isinstance(given, Sequence) or isinstance(given, str):
        raise TypeError(f"{call}: expected a list of tensors, got {type(given).__name__}")
    if not given:
        raise ValueError(f"{call}: the list of tensors is empty")
    for tensor in given:
        check_tensor(tensor, call)
    return list(given)


def check_overwritten(tensor: torch.Tensor, call: str) -> None:
    """Raise where writing over ``tensor`` would make its gradient wrong without a word."""
    if torch.is_grad_enabled() and tensor.requires_grad and not tensor.is_leaf:
        raise ValueError(
            f"{call}: the tensor requires a gradient, which a call in place does not support. Use "
            f"{call.replace('_async_', '_async').removesuffix('_')}, or pass tensor.detach()."
        )


def reduction(op: Any, average: Any, call: str) -> ReduceOp:
    """Return the reduction that ``op`` means, also where it is a constant of Horovod's, or ``average`` in its stead.

    Raises ``TypeError``, ``ValueError`` or, for Adasum, :class:`agmerge.AGMergeError`; ``call``: the name in errors.
    """
    if isinstance(average, ReduceOp) or isinstance(average, str):
        raise TypeError(f"{call}: average must be True or False, got {average!r}. Pass op= and name= by keyword.")
    if op is not None and average is not None:
        raise ValueError(f"{call}: The op parameter supersedes average. Please provide only one of them.")
    if op is None:
        return Sum if average is not None and not average else Average
    name = horovod_names.horovod_reduction(op)
    if name is not None:
        op = ReduceOp(name)
    if not isinstance(op, ReduceOp):
        raise ValueError(f"{call}: op must be {OPS}, got {op!r}")
    if op is ReduceOp.ADASUM:
        raise AGMergeError(f"AGM303: {call}: op=Adasum is supported by Horovod only. Use {OPS}.")
    return op


def compressor(given: Any, call: str) -> Compressor:
    """Return ``given``, the ``compression=`` of a collective, or raise ``TypeError`` if it is no cast."""
    if hasattr(given, "compress") and hasattr(given, "decompress"):
        return given  # type: ignore[no-any-return]
    raise TypeError(f"{call}: compression must be agmerge.Compression.none, .fp16 or .bf16, got {given!r}")


def factor(given: Any, name: str, call: str) -> float:
    """Return ``prescale_factor`` or ``postscale_factor``, the one that ``name`` names, as a number."""
    try:
        return float(given)
    except (TypeError, ValueError):
        raise TypeError(f"{call}: {name} must be a number, got {given!r}") from None
