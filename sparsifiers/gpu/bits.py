# SPDX-License-Identifier: Apache-2.0
"""Pack flags into words, and read them, with torch's operations."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_bits(flags: Tensor, words: Tensor) -> None:
    """Write bool[n] into int32 words, the first in the lowest bit; the bits behind them are 0."""
    spread = torch.zeros(32 * len(words), dtype=torch.int32, device=words.device)
    spread[: len(flags)] = flags
    classes = torch.arange(32, dtype=torch.int32, device=words.device)
    words.copy_((spread.view(-1, 32) << classes).sum(1, dtype=torch.int32))


def bits_of(words: Tensor) -> Tensor:
    """Return the bits of int32 words along the last dimension, the lowest first: int32[..., 32 * words]."""
    classes = torch.arange(32, dtype=torch.int32, device=words.device)
    return (words[..., None] >> classes & 1).flatten(-2)
