# SPDX-License-Identifier: Apache-2.0
"""Call the compiled loops of kernel_values.c: the codecs of a few bits a value, with float32 scales of blocks of 256.

They write and read the bytes of `Steps` and `Signs` of agmerge, which do it where these loops cannot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsifiers.kernel import loaded, plain


def encode(values: Tensor, used: int, width: int, scales: Tensor, codes: Tensor, read: Tensor) -> bool:
    """Write `scales`, `codes` and the values to be `read`; False, with nothing done, if torch must do it.

    values: fp32 [m], of which the first `used` are in use, and the others 0. width: bits a value, 8, 4, 2 or 1. scales:
    fp32, one for each block of 256 values, with a width of 2 two; codes: uint8[ceil(m * width / 8)]; read: fp32, m
    slots or more, of which the first m are written: behind those in use 0.
    """
    count = values.numel()
    if not (plain(values, scales, read) and plain(codes, dtype=torch.uint8)):
        return False
    if not _fit(count, width, scales, codes, read) or codes.numel() != -(-count * width // 8):
        return False
    loaded().kernel_values_encode(
        values.data_ptr(), count, used, width, scales.data_ptr(), codes.data_ptr(), read.data_ptr()
    )
    return True


def decode(scales: Tensor, codes: Tensor, count: int, width: int, read: Tensor) -> bool:
    """Read the first `count` values that `encode` has written; False, with nothing done, if torch must do it."""
    if not (plain(scales, read) and plain(codes, dtype=torch.uint8) and _fit(count, width, scales, codes, read)):
        return False
    loaded().kernel_values_decode(scales.data_ptr(), codes.data_ptr(), count, width, read.data_ptr())
    return True


def _fit(count: int, width: int, scales: Tensor, codes: Tensor, read: Tensor) -> bool:
    """Return whether there is room for so many values."""
    each = 2 if width == 2 else 1
    return (
        scales.numel() >= each * -(-count // 256) and codes.numel() >= -(-count * width // 8) and read.numel() >= count
    )
