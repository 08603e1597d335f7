# SPDX-License-Identifier: Apache-2.0
"""Send the signs, or a few levels, of rotated blocks, with the scale that makes them unbiased: ``eden``.

Vargaftik et al., "EDEN: Communication-Efficient and Robust Distributed Mean Estimation for Federated Learning", ICML
2022, any number of bits; with one bit it is the same authors' "DRIVE: One-bit Distributed Mean Estimation", NeurIPS
2021.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsifiers.quantising.base import Quantiser
from sparsifiers.quantising.draws import Draws
from sparsifiers.quantising.levels import LEAST, LEVELS, MOST, SPIKE, thresholds
from sparsifiers.quantising.rotation import folded, hadamard
from sparsifiers.quantising.scales import SCALE, as_bits

NOISE = {1: 0.571, 2: 0.133, 3: 0.036, 4: 0.0096}  # see `Quantiser.noise`


class Eden(Quantiser):
    """Quantiser of 1 to 4 bits: random signs, a Hadamard matrix, levels of a normal distribution, an unbiased scale.

    A record is the scale, with a sign that says whether the block was rotated twice. Behind it are the bits of all
    coordinates, plane by plane: the signs (1: minus), then the numbers of the levels from their lowest bit on.
    Coordinate i has bit i % 8 of byte i // 8 of a plane.
    """

    unbiased = True
    bits: int

    def __init__(self, bits: int = 2) -> None:
        if bits not in LEVELS:
            raise ValueError(f"eden has 1, 2, 3 or 4 bits a coordinate, not {bits!r}")
        self.bits = bits
        self.name, self.noise = f"eden-{bits}", NOISE[bits]
        self._levels: dict[torch.device, Tensor] = {}  # by device, where copies of the host would wait each time

    def loops(self) -> int:
        return self.bits

    def record_bytes(self, size: int) -> int:
        return SCALE + self.bits * size // 8

    def _encode(self, blocks: Tensor, draws: Draws, out: Tensor) -> None:
        count, size = blocks.shape
        # A power of two brings the largest magnitude of a block into [1, 2), so that squares neither vanish nor
        # overflow; of the very largest into [2, 4).
        exponents = blocks.abs().amax(dim=1).view(torch.int32) >> 23
        blocks.mul_(_power_of_two(254 - exponents).unsqueeze(1))
        squares = blocks.square()
        energy, highest = folded(squares), squares.amax(dim=1)
        again = (highest > SPIKE[self.bits] * energy) & (highest < energy)
        rotated = hadamard(blocks.mul_(draws.signs(count, size, 0, blocks.device)))
        twice = hadamard(rotated * draws.signs(count, size, 1, blocks.device))
        rotated = torch.where(again.unsqueeze(1), twice, rotated)
        root = torch.where(again, energy * size, energy).sqrt_().unsqueeze(1)
        negative = rotated < 0
        magnitudes = rotated.abs_()
        numbers = torch.zeros_like(magnitudes, dtype=torch.uint8)
        for threshold in thresholds(self.bits):
            numbers += magnitudes > root * threshold
        levels = self._levels_on(blocks.device)[numbers.int()]
        scale = energy / folded(magnitudes.mul_(levels)) * _power_of_two(exponents)
        scale = torch.where(scale >= LEAST, scale.clamp(max=MOST), 0.0)
        written = as_bits(torch.where(exponents == 255, torch.nan, scale))
        written |= again.to(torch.int16) << 15
        out[:, :SCALE] = written.unsqueeze(1).view(torch.uint8)
        planes = [negative, *(numbers >> bit & 1 for bit in range(self.bits - 1))]
        out[:, SCALE:] = torch.cat([_packed(plane) for plane in planes], dim=1)

    def _decode(self, data: Tensor, draws: Draws, size: int) -> Tensor:
        count, device = len(data), data.device
        scale = data[:, :SCALE].contiguous().view(torch.bfloat16).view(-1)
        again = torch.signbit(scale)
        planes = _unpacked(data[:, SCALE:], size)
        numbers = torch.zeros(count, size, dtype=torch.int32, device=device)
        for bit in range(self.bits - 1):
            numbers += planes[:, bit + 1].int() << bit
        levels = self._levels_on(device)[numbers]
        read = hadamard(torch.where(planes[:, 0] == 1, -levels, levels))  # of integers: exact in any order
        twice = hadamard(read * draws.signs(count, size, 1, device))
        read = torch.where(again.unsqueeze(1), twice, read)
        read.mul_(draws.signs(count, size, 0, device))
        return read.mul_(scale.float().abs_().unsqueeze(1))

    def _levels_on(self, device: torch.device) -> Tensor:
        """Return the levels of magnitudes, float32[2 ** (bits - 1)]."""
        if device not in self._levels:
            self._levels[device] = torch.tensor(LEVELS[self.bits], dtype=torch.float32, device=device)
        return self._levels[device]


def _power_of_two(exponents: Tensor) -> Tensor:
    """Return 2**(e - 127) of int32 `exponents`, those outside of 1 to 254 as the nearest of these: float32."""
    return (exponents.clamp(1, 254) << 23).view(torch.float32)


def _packed(plane: Tensor) -> Tensor:
    """Return bits, (n, size) of 0 and 1, eight a byte, the first in the lowest: uint8[n, size / 8]."""
    places = torch.arange(8, dtype=torch.uint8, device=plane.device)
    return (plane.to(torch.uint8).view(len(plane), -1, 8) << places).sum(dim=2, dtype=torch.uint8)


def _unpacked(data: Tensor, size: int) -> Tensor:
    """Return the bits of `data`, uint8[n, planes * size / 8], plane by plane: uint8[n, planes, size]."""
    places = torch.arange(8, dtype=torch.uint8, device=data.device)
    return (data.unsqueeze(2) >> places & 1).view(len(data), -1, size)
