"""How contributions are combined, and the names of Horovod's two casts."""

from __future__ import annotations

import enum


class ReduceOp(enum.Enum):
    """How the contributions of all ranks become one tensor."""

    AVERAGE = "average"
    SUM = "sum"

    def scale(self, size: int) -> float:
        """The factor that turns a sum over ``size`` ranks into this reduction."""
        return 1.0 / size if self is ReduceOp.AVERAGE else 1.0


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM


class Compression(enum.Enum):
    """Horovod's spelling of ``compression="none" | "fp16" | "bf16"``."""

    none = "none"
    fp16 = "fp16"
    bf16 = "bf16"
