# SPDX-License-Identifier: Apache-2.0
"""Write floats of 8 bits behind a power of two: fp8, with 4 bits of exponent and 3 of mantissa."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsifiers.quantising.base import Quantiser
from sparsifiers.quantising.draws import Draws
from sparsifiers.quantising.scales import SCALE, as_scale, bounded, read_scale, steps_of, write_scale

TOP = 128.0  # the largest magnitude of a block is brought to this or up to twice it; e4m3 ends at 448
EXPONENT = 0x7F800000  # the bits of a float32's exponent


class Float8(Quantiser):
    """Quantiser to floats of 8 bits, e4m3, rounded to nearest, times a power of two for each block: ``fp8``.

    The codec of torchft's `allreduce_quantized`, with a scale for a block instead of a row: Micikevicius et al., "FP8
    Formats for Deep Learning", arXiv 2209.05433, for the format; the power of two is as in the Open Compute Project's
    "Microscaling Formats". A coordinate down to 2**-13 of the block's largest is read with a relative error of 1/16 at
    most, so no feedback is asked for. Rounding to nearest is not unbiased.

    A power of two costs no precision, as codes are floats, and values read are multiples of a power of two.
    """

    name = "fp8"
    bits = 8
    unbiased = False
    noise = 7.0e-4

    def __init__(self) -> None:
        if not hasattr(torch, "float8_e4m3fn"):
            raise ValueError(
                f"fp8 is not supported: torch {torch.__version__} has no float8_e4m3fn. Use 'int8', or a newer torch."
            )

    def record_bytes(self, size: int) -> int:
        return SCALE + size

    def _encode(self, blocks: Tensor, draws: Draws, out: Tensor) -> None:
        largest = bounded(blocks)
        power = (largest.view(torch.int32) & EXPONENT).view(torch.float32)  # infinite for NaN
        scale = as_scale(torch.where(largest.isnan(), torch.nan, power / TOP))
        write_scale(scale, out)
        out[:, SCALE:] = steps_of(blocks, scale).to(torch.float8_e4m3fn).view(torch.uint8)

    def _decode(self, data: Tensor, draws: Draws, size: int) -> Tensor:
        codes = data[:, SCALE:].view(torch.float8_e4m3fn)
        return codes.to(torch.float32).mul_(read_scale(data))
