# SPDX-License-Identifier: Apache-2.0
"""Read magnitudes as integers: the bits of a float without its sign bit.

Sign-magnitude formats (IEEE 754 and bfloat16) are laid out so that these integers rise with |a|: zeros of
both signs are 0, subnormals, normals and inf follow in order, and NaN comes after inf. One integer comparison
therefore serves every dtype, and does not depend on the flush-to-zero mode of the thread. It treats NaN as the largest
value without a special case (two NaNs compare by their payload).
"""

from __future__ import annotations

import torch
from torch import Tensor

INTEGERS = {  # of the same width, by float
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def bit_view(vector: Tensor) -> Tensor:
    """View a float tensor as signed integers of the same width: the same storage, the same strides."""
    return vector.view(INTEGERS[vector.dtype])


def magnitude_mask(dtype: torch.dtype) -> int:
    """Return the integer that clears the sign bit: bit_view(vector) & mask is the magnitude's key, in [0, mask]."""
    return int(torch.iinfo(INTEGERS[dtype]).max)
