# SPDX-License-Identifier: Apache-2.0
"""Write integers of a few bits behind a scale, and read them as so many times that scale."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsifiers.quantising.base import Quantiser
from sparsifiers.quantising.draws import Draws
from sparsifiers.quantising.scales import SCALE, read_scale, write_scale


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
