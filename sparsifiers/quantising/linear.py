# SPDX-License-Identifier: Apache-2.0
"""Quantisers that round to the nearest level under a scale: int8 and int4 with evenly spaced levels, fp8 with floats.

Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", arXiv 2306.10209, where
gradients have 4 bits (qgZ); ByteGrad of Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations",
VLDB 2022, has 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsifiers.quantising.base import INT4, INT8, Quantiser
from sparsifiers.quantising.draws import SCALE, Draws, as_scale, bounded, read_scale, steps_of, write_scale


class Integers(Quantiser):
    """Quantiser with a scale and integers of 2, 4 or 8 bits: values read are one times the other, exactly.

    A record is the scale, then the integers, in two's complement, from ``-levels`` to ``levels``; see :func:`packed`.
    A subclass writes `_encode`, which ends in :meth:`_write`.
    """

    width: int  # bits of an integer
    levels: int  # the largest magnitude that is written: symmetric

    def __init__(self, width: int) -> None:
        self.width = width
        self.bits = width
        self.levels = (1 << (width - 1)) - 1

    def record_bytes(self, size: int) -> int:
        return SCALE + size * self.width // 8

    def _write(self, scale: Tensor, steps: Tensor, out: Tensor) -> None:
        """Write ``scale``, float32[n, 1], and ``steps``, integers as float32[n, size], to the records ``out``."""
        write_scale(scale, out)
        codes = steps.clamp_(-self.levels, self.levels).to(torch.int8).view(torch.uint8)
        out[:, SCALE:] = packed(codes & (1 << self.width) - 1, self.width)

    def _decode(self, data: Tensor, draws: Draws, size: int) -> Tensor:
        middle = 1 << (self.width - 1)  # flipping the sign's bit orders the codes from -middle on
        codes = unpacked(data[:, SCALE:], self.width) ^ middle
        return codes.to(torch.float32).sub_(middle).mul_(read_scale(data))


def packed(codes: Tensor, width: int) -> Tensor:
    """Return codes of 1, 2, 4 or 8 bits, uint8[n, size], several a byte: uint8[n, size * width / 8].

    Those of a byte stand as far from each other as there are bytes: with two a byte, byte i has code i in its low bits
    and code i + size / 2 in its high ones. So packing is whole rows of bytes, shifted and joined.
    """
    groups = codes.view(len(codes), 8 // width, -1)
    joined = groups[:, 0]
    for number in range(1, groups.shape[1]):
        joined = joined | groups[:, number] << number * width
    return joined


def unpacked(data: Tensor, width: int) -> Tensor:
    """Return the codes that :func:`packed` has joined, uint8[n, size], from uint8[n, size * width / 8]."""
    mask = (1 << width) - 1
    return torch.cat([data >> number * width & mask for number in range(8 // width)], dim=1)


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


class Linear(Integers):
    """Quantiser to integers of 8 or 4 bits, rounded to nearest, of which the largest is 127 or 7.

    No coordinate is read farther from its value than half a step, nor farther than 0 is. That is not unbiased: the
    same vector is read with the same error each time, and values of less than half a step are never read. At 8 bits the
    error is 5e-5 of a block's energy, so no feedback is asked for; where 4 bits stall a training, use `eden-4`.

    Applied to the values that it has read itself it writes the same bytes again.
    """

    unbiased = False

    def _encode(self, blocks: Tensor, draws: Draws, out: Tensor) -> None:
        scale = as_scale(bounded(blocks) / self.levels)
        self._write(scale, steps_of(blocks, scale).round_(), out)  # halves go to the even integer


class Int8(Linear):
    """Quantiser to integers of 8 bits: ``int8``."""

    name = "int8"
    noise = 4.9e-5

    def __init__(self) -> None:
        super().__init__(width=8)

    def loops(self) -> int:
        return INT8


class Int4(Linear):
    """Quantiser to integers of 4 bits: ``int4``."""

    name = "int4"
    noise = 0.016

    def __init__(self) -> None:
        super().__init__(width=4)

    def loops(self) -> int:
        return INT4
