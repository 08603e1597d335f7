# SPDX-License-Identifier: Apache-2.0
"""Selection from a vector, on its device: the entries of a message, and how many are in use."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slots:
    """Places and values of a selection; entries at and behind the count are 0.

    `indices` and `values` may be sections of a message.
    """

    indices: Tensor  # int32[capacity], ascending
    values: Tensor  # fp32, fp16 or bf16[capacity], as receivers will read them
    count: Tensor  # int32, 0-dim

    @classmethod
    def of(cls, capacity: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Slots:
        """Return new buffers, which hold anything: `gather` writes all of them."""
        indices = torch.empty(capacity, dtype=torch.int32, device=device)
        values = torch.empty(capacity, dtype=dtype, device=device)
        return cls(indices, values, torch.empty((), dtype=torch.int32, device=device))
