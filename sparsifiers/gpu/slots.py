"""Hold what is taken from a vector, on its device: the slots of a message, and how many are in use."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slots:
    """Hold the places and the values that a selection has taken; slots at and behind the count are 0.

    `indices` and `values` may be parts of a message.
    """

    indices: Tensor  # int32[capacity], ascending
    values: Tensor  # fp32, fp16 or bf16[capacity], as receivers will read them
    count: Tensor  # int32, 0-dim

    @classmethod
    def of(cls, capacity: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Slots:
        """Return new buffers, all 0."""
        indices = torch.zeros(capacity, dtype=torch.int32, device=device)
        values = torch.zeros(capacity, dtype=dtype, device=device)
        return cls(indices, values, torch.zeros((), dtype=torch.int32, device=device))
