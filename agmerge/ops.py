# SPDX-License-Identifier: Apache-2.0
"""Reductions of the ranks' contributions, and Horovod's two casts."""

from __future__ import annotations

import enum

import torch


class ReduceOp(enum.Enum):
    """Reduction of the tensors of all ranks: ``agmerge.Average``, ``Sum``, ``Min``, ``Max`` or ``Product``."""

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    ADASUM = "adasum"  # Horovod's, refused wherever it is given

    def scale(self, size: int) -> float:
        """Return the factor that turns a sum over ``size`` ranks into this reduction."""
        return 1.0 / size if self is ReduceOp.AVERAGE else 1.0


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT
Adasum = ReduceOp.ADASUM


class Compression(enum.Enum):
    """Horovod's names of casts: ``agmerge.Compression.none``, ``fp16`` and ``bf16``.

    ``compression=agmerge.Compression.none`` turns compression off.
    """

    none = "none"
    fp16 = "fp16"
    bf16 = "bf16"

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Cast a floating-point ``tensor``. Return it, and the context that ``decompress`` needs."""
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.value)
        if dtype is None or not tensor.dtype.is_floating_point:
            return tensor, None
        return tensor.to(dtype), tensor.dtype

    def decompress(self, tensor: torch.Tensor, context: torch.dtype | None) -> torch.Tensor:
        """Cast ``tensor`` back to the dtype that it had before ``compress``."""
        return tensor if context is None else tensor.to(context)
