"""Name how contributions are combined, and Horovod's two casts."""

from __future__ import annotations

import enum

import torch


class ReduceOp(enum.Enum):
    """Say how the contributions of all ranks become one tensor."""

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
    """Spell ``compression="none" | "fp16" | "bf16"`` as Horovod does."""

    none = "none"
    fp16 = "fp16"
    bf16 = "bf16"

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Cast a floating-point ``tensor`` for the wire; return it and what ``decompress`` wants to know."""
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.value)
        if dtype is None or not tensor.dtype.is_floating_point:
            return tensor, None
        return tensor.to(dtype), tensor.dtype

    def decompress(self, tensor: torch.Tensor, context: torch.dtype | None) -> torch.Tensor:
        """Cast ``tensor`` back to the dtype that ``compress`` has seen."""
        return tensor if context is None else tensor.to(context)
