# SPDX-License-Identifier: Apache-2.0
"""Quantiser of rotated blocks, ``eden``: their signs, or a few levels, with the scale that makes them unbiased.

Vargaftik et al., "EDEN: Communication-Efficient and Robust Distributed Mean Estimation for Federated Learning", ICML
2022, any number of bits; with one bit it is the same authors' "DRIVE: One-bit Distributed Mean Estimation", NeurIPS
2021.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsifiers.quantising.base import Quantiser
from sparsifiers.quantising.draws import FLAT, LARGEST, LEVELS, NAN, SCALE, SMALLEST, SPIKE, Draws, thresholds

# Rotations by a Hadamard matrix, with a fixed order of additions: torch's operations and compiled loops agree.


def hadamard(rows: Tensor) -> Tensor:
    """Return the product of each of ``rows``, (n, size), with the Hadamard matrix of that size, a power of two.

    It is not normalised: applied twice it multiplies by ``size``. Sylvester's construction by butterflies of distance
    1, 2, 4, ... (Fino and Algazi, 1976): each is one addition and one subtraction, so rounding has one order.
    """
    count, size = rows.shape
    distance = 1
    while distance < size:
        pairs = rows.view(count, size // (2 * distance), 2, distance)
        left, right = pairs[:, :, 0], pairs[:, :, 1]
        rows = torch.stack((left + right, left - right), dim=2).view(count, size)
        distance *= 2
    return rows


def folded(rows: Tensor) -> Tensor:
    """Return the sums of ``rows``, (n, size), size a power of two: (n,). Halves are added: rounding has one order."""
    half = rows.shape[1]
    while half > 1:
        half //= 2
        rows = rows[:, :half] + rows[:, half : 2 * half]
    return rows[:, 0]


# The quantiser.

NOISE = {1: 0.571, 2: 0.133, 3: 0.036, 4: 0.0096}  # see `Quantiser.noise`
MIXED = 1  # bit of a record's first byte, the last one of its scale


class Eden(Quantiser):
    """Quantiser of 1 to 4 bits: random signs, a Hadamard matrix, levels of a normal distribution, an unbiased scale.

    A record is the scale, with a sign that says whether the block was rotated twice. Behind it are the bits of all
    coordinates, plane by plane: the signs (1: minus), then the numbers of the levels from their lowest bit on.
    Coordinate i has bit i % 8 of byte i // 8 of a plane.

    A rotation would make noise of zeros. So a block of zeros and others is a *mixed* record, as long as the others: the
    scale has its last bit set. Behind it are a plane with a 1 for each coordinate that is not zero, and the
    planes of the same block with one bit less. Receivers set the others to zero, so the mean stays right. With one
    bit there is room for half of a block, which a random word chooses: it is rotated by itself, and counts twice.
    """

    unbiased = True
    masks_zeros = True
    bits: int

    def __init__(self, bits: int = 2) -> None:
        if bits not in LEVELS:
            raise ValueError(f"eden supports 1, 2, 3 or 4 bits per value, got {bits!r}")
        self.bits = bits
        self.name, self.noise = f"eden-{bits}", NOISE[bits]
        self._levels: dict[tuple[int, torch.device], Tensor] = {}  # on devices, where copies would wait each time

    def loops(self) -> int:
        return self.bits

    def record_bytes(self, size: int) -> int:
        return SCALE + self.bits * size // 8

    def _encode(self, blocks: Tensor, draws: Draws, out: Tensor) -> None:
        self._encode_known(blocks, blocks == 0, draws, out)

    def _encode_known(self, blocks: Tensor, zeros: Tensor, draws: Draws, out: Tensor) -> None:
        largest = blocks.abs().amax(dim=1)
        mixed = zeros.any(dim=1) & (largest > 0) & largest.isfinite()
        record = self._written(self.bits, blocks, _signs(draws, blocks, 0), _signs(draws, blocks, 1))
        if blocks.device.type != "cpu" or bool(mixed.any()):  # a device would be waited for
            record = torch.where(mixed.unsqueeze(1), self._mixed(blocks, zeros, draws), record)
        out.copy_(record)

    def _mixed(self, blocks: Tensor, zeros: Tensor, draws: Draws) -> Tensor:
        """Return mixed records of all blocks: uint8[n, record_bytes]."""
        once, twice, kept = _signs(draws, blocks, 0), _signs(draws, blocks, 1), ~zeros
        if self.bits > 1:
            record = self._written(self.bits - 1, blocks, once, twice)
        else:
            later = _is_later(draws, blocks)
            kept = _half(kept, later)
            blocks, once, twice = (_half(each, later) for each in (blocks, once, twice))
            record = self._written(1, blocks, once, twice, factor=2.0)
        return torch.cat([record[:, :1] | MIXED, record[:, 1:SCALE], _packed(kept), record[:, SCALE:]], dim=1)

    def _written(self, bits: int, blocks: Tensor, once: Tensor, twice: Tensor, factor: float = 1.0) -> Tensor:
        """Return records of blocks, none of them mixed, in so many bits: uint8[n, bytes].

        once, twice: signs before each rotation. factor: a power of two, by which values are read larger.
        """
        size = blocks.shape[1]
        # A power of two brings the largest magnitude of a block into [1, 2), so that squares neither vanish nor
        # overflow; of the very largest into [2, 4).
        exponents = blocks.abs().amax(dim=1).view(torch.int32) >> 23
        blocks = blocks * _power_of_two(254 - exponents).unsqueeze(1)
        squares = blocks.square()
        energy, highest = folded(squares), squares.amax(dim=1)
        again = (highest > SPIKE[bits] * energy) & (highest < energy) | (highest * size < FLAT * energy)
        rotated = hadamard(blocks * once)
        rotated = torch.where(again.unsqueeze(1), hadamard(rotated * twice), rotated)
        root = torch.where(again, energy * size, energy).sqrt_().unsqueeze(1)
        negative = rotated < 0
        magnitudes = rotated.abs_()
        numbers = torch.zeros_like(magnitudes, dtype=torch.uint8)
        for threshold in thresholds(bits):
            numbers += magnitudes > root * threshold
        levels = self._levels_on(bits, blocks.device)[numbers.int()]
        scale = energy / folded(magnitudes.mul_(levels)) * _power_of_two(exponents) * factor
        scale = torch.where(scale >= SMALLEST, scale.clamp(max=LARGEST), 0.0)
        written = torch.where(exponents == 255, NAN, _rounded(scale)) | again.int() << 15
        planes = [negative, *(numbers >> bit & 1 for bit in range(bits - 1))]
        head = written.to(torch.int16).unsqueeze(1).view(torch.uint8)
        return torch.cat([head, *(_packed(plane) for plane in planes)], dim=1)

    def _decode(self, data: Tensor, draws: Draws, size: int) -> Tensor:
        like = torch.empty(len(data), size, device=data.device)
        once, twice = _signs(draws, like, 0), _signs(draws, like, 1)
        read = self._read(self.bits, data, once, twice)
        mixed = (data[:, :1] & MIXED) > 0
        if data.device.type == "cpu" and not bool(mixed.any()):
            return read
        if self.bits > 1:
            kept, planes = data[:, SCALE : SCALE + size // 8], data[:, SCALE + size // 8 :]
            other = self._read(self.bits - 1, torch.cat([data[:, :SCALE], planes], dim=1), once, twice)
            other = torch.where(_unpacked(kept, size)[:, 0] > 0, other, 0.0)
        else:
            later, planes = _is_later(draws, like), data[:, SCALE + size // 16 :]
            kept = _unpacked(data[:, SCALE : SCALE + size // 16], size // 2)[:, 0] > 0
            halves = torch.cat([data[:, :SCALE], planes], dim=1), _half(once, later), _half(twice, later)
            half = torch.where(kept, self._read(1, *halves), 0.0)
            other = torch.cat([half.masked_fill(later, 0.0), half.masked_fill(~later, 0.0)], dim=1)
        return torch.where(mixed, other, read)

    def _zeros(self, data: Tensor, draws: Draws, size: int) -> Tensor:
        """Return which coordinates records hold no value of, bool[n, size]: receivers read zeros there."""
        mixed = data[:, :1] & MIXED > 0
        if self.bits > 1:
            kept = _unpacked(data[:, SCALE : SCALE + size // 8], size)[:, 0] > 0
        else:
            later = _is_later(draws, data)
            half = _unpacked(data[:, SCALE : SCALE + size // 16], size // 2)[:, 0] > 0
            kept = torch.cat([half & ~later, half & later], dim=1)
        empty = (data[:, :1] & ~MIXED | data[:, 1:SCALE] & 0x7F) == 0
        return empty | (mixed & ~kept)

    def _read(self, bits: int, data: Tensor, once: Tensor, twice: Tensor) -> Tensor:
        """Return the values of records that are not mixed: float32[n, size]. once, twice: as when they were written."""
        size = once.shape[1]
        scale = data[:, :SCALE].contiguous().view(torch.int16).view(-1).int()
        planes = _unpacked(data[:, SCALE:], size)
        numbers = torch.zeros_like(once, dtype=torch.int32)
        for bit in range(bits - 1):
            numbers += planes[:, bit + 1].int() << bit
        levels = self._levels_on(bits, once.device)[numbers]
        read = hadamard(torch.where(planes[:, 0] == 1, -levels, levels))  # of integers: exact in any order
        read = torch.where((scale < 0).unsqueeze(1), hadamard(read * twice), read)
        read.mul_(once)
        return read.mul_(((scale & 0x7FFE) << 16).view(torch.float32).unsqueeze(1))

    def _levels_on(self, bits: int, device: torch.device) -> Tensor:
        """Return the levels of magnitudes of so many bits, float32[2 ** (bits - 1)]."""
        if (bits, device) not in self._levels:
            self._levels[bits, device] = torch.tensor(LEVELS[bits], dtype=torch.float32, device=device)
        return self._levels[bits, device]


def _signs(draws: Draws, blocks: Tensor, stream: int) -> Tensor:
    """Return random signs for all of ``blocks``, alike."""
    count, size = blocks.shape
    return draws.signs(count, size, stream, blocks.device)


def _is_later(draws: Draws, blocks: Tensor) -> Tensor:
    """Return whether a mixed record of one bit has the second half of each of ``blocks``, (n, ...): bool[n, 1]."""
    return (draws.words(len(blocks), 2, blocks.device)[:, :1] & 1) > 0


def _half(blocks: Tensor, later: Tensor) -> Tensor:
    """Return one half of each of ``blocks``, (n, size): the second one if ``later``, bool[n, 1]."""
    first, second = blocks.chunk(2, dim=1)
    return torch.where(later, second, first)


def _rounded(scale: Tensor) -> Tensor:
    """Return float32 ``scale`` as bits of a bfloat16 of which the last one is 0, to nearest: int32, as long."""
    bits = scale.view(torch.int32)
    return (bits + 0xFFFF + (bits >> 17 & 1) >> 17) << 1


def _power_of_two(exponents: Tensor) -> Tensor:
    """Return 2**(e - 127) of int32 `exponents`, those outside of 1 to 254 as the nearest of these: float32."""
    return (exponents.clamp(1, 254) << 23).view(torch.float32)


def _packed(plane: Tensor) -> Tensor:
    """Return bits, (n, size) of 0 and 1, eight a byte, the first in the lowest: uint8[n, size / 8]."""
    places = torch.arange(8, dtype=torch.uint8, device=plane.device)
    return (plane.to(torch.uint8).view(len(plane), plane.shape[1] // 8, 8) << places).sum(dim=2, dtype=torch.uint8)


def _unpacked(data: Tensor, size: int) -> Tensor:
    """Return the bits of `data`, uint8[n, planes * size / 8], plane by plane: uint8[n, planes, size]."""
    places = torch.arange(8, dtype=torch.uint8, device=data.device)
    return (data.unsqueeze(2) >> places & 1).view(len(data), 8 * data.shape[1] // size, size)
