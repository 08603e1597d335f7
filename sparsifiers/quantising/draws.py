# SPDX-License-Identifier: Apache-2.0
"""Scales and levels of blocks, and random words that every rank can draw for any block, in any order.

A word is a pure function of a key and a number: splitmix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
Generators", OOPSLA 2014), at any value of its counter. No generator of the process is used, and torch's operations and
compiled loops draw the same bits.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

# Scales: one for each block, in two bytes. Its product with a short code is exact, never subnormal and never infinite.
#
# A scale is a bfloat16, of 8 significant bits. Codes have 7 at most, so a product has 15 and fits into a float32 as it
# is: a machine that fuses it with the addition behind it gets the same bits. Four bytes would buy nothing: codes are
# chosen for the scale as it was rounded, which moves the levels by 0.4 % at most and adds no error of its own.

SCALE = 2  # bytes
NAN = 0x7FC0  # bits of a bfloat16
# A smaller scale is 0. Values read are multiples of 2**-7 times this one, as a scale has 8 significant bits; or of
# 2**-9 times, by the least code of fp8, with scales of one bit. A sum of such multiples, times 1 / 256 for as many
# senders, is then 0 or at least 2**-126. Smaller numbers are subnormal, and some machines make them 0.
LEAST = 2.0**-109
MOST = 2.0**119  # a larger magnitude is this, so that a sum over 2**8 senders is finite, also after rounding up


def bounded(blocks: Tensor) -> Tensor:
    """Cut magnitudes of ``blocks``, float32[n, size], off at MOST, in place, and return the largest: float32[n, 1].

    It is NaN for a block with a value that is not finite; the other values of such a block have no meaning.
    """
    largest = blocks.abs().amax(dim=1, keepdim=True)
    blocks.clamp_(-MOST, MOST)
    return torch.where(largest.isfinite(), largest.clamp(max=MOST), torch.nan)


def as_scale(wanted: Tensor, up: bool = False) -> Tensor:
    """Return the scales that receivers read for those that are ``wanted``, float32[n, 1], at least 0: alike.

    up: whether to round up, so that nothing is more steps of a scale than of the wanted one; else to nearest.
    """
    if up:
        rounded = (wanted.view(torch.int32) + 0xFFFF & -0x10000).view(torch.float32)
    else:
        rounded = wanted.to(torch.bfloat16).to(torch.float32)
    rounded = torch.where(wanted < LEAST, 0.0, rounded)
    return torch.where(wanted.isnan(), torch.nan, rounded)


def steps_of(blocks: Tensor, scale: Tensor) -> Tensor:
    """Return how many times ``scale``, float32[n, 1], all of ``blocks`` are: alike; 0 where the scale is 0 or NaN."""
    return torch.where(scale > 0, blocks / scale, 0.0)


def write_scale(scale: Tensor, out: Tensor) -> None:
    """Put ``scale``, float32[n, 1] from :func:`as_scale`, in front of the records ``out``, uint8[n, bytes]."""
    out[:, :SCALE] = as_bits(scale).view(torch.uint8)


def as_bits(scale: Tensor) -> Tensor:
    """Return float32 ``scale`` as bits of bfloat16, to nearest: int16, as long. Every NaN is the same one."""
    rounded = scale.to(torch.bfloat16).view(torch.int16)
    return torch.where(scale.isnan(), NAN, rounded)  # torch's own differs by the instructions that a processor has


def read_scale(data: Tensor) -> Tensor:
    """Return the scale in front of each of the records ``data``, uint8[n, bytes]: float32[n, 1]."""
    return data[:, :SCALE].contiguous().view(torch.bfloat16).to(torch.float32)


# Levels to which `eden` rounds rotated blocks: those of Lloyd (1982) and Max (1960) for a normal distribution. Torch's
# operations, the loops in C (`kernel_quantise_codes.h`) and the kernels in Triton have the same.

# By bits: the levels of magnitudes, in units of a block's root mean square; and the same as integers, of which a sum
# over 256 signs fits into 16 bits. Decoding is then exact up to its one multiplication by the scale.
EXACT = {
    1: (0.7979,),
    2: (0.4528, 1.5104),
    3: (0.2451, 0.7560, 1.3439, 2.1520),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326),
}
LEVELS = {1: (30,), 2: (30, 100), 3: (12, 36, 64, 103), 4: (6, 18, 30, 43, 58, 74, 95, 126)}
# A rotation does not hide one coordinate of more than this share of a block's energy: it would arrive with a gain of
# 1.02 and more. Such a block is rotated twice.
SPIKE = {1: 1 / 16, 2: 1 / 8, 3: 1 / 8, 4: 1 / 8}
# Nor does it hide that all are alike: few sums come of it, some next to the end of a level, and the mean would be off
# by 5 % of the norm. A block is rotated twice if its largest square is less than so many times its mean square.
FLAT = 4.0
SMALLEST = 2.0**-118  # a smaller scale is 0, so that no value read is subnormal: some machines make that zero
LARGEST = 2.0**104  # a larger one is this, so that no sum over up to 2**8 senders is infinite


def thresholds(bits: int) -> tuple[float, ...]:
    """Return where one level ends and the next begins, in units of a block's root mean square."""
    return tuple((low + high) / 2 for low, high in pairwise(EXACT[bits]))


# Random words.

GOLDEN = 0x9E3779B97F4A7C15  # the odd number nearest to 2**64 / the golden ratio: a step of splitmix64's counter
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
MASK = (1 << 64) - 1
INVERSES = (0x96DE1B173F119089, 0x319642B2D24D8EC3)  # of the factors, modulo 2**64
WORDS = 4  # of 64 bits that a block has of its own in one stream: a bit for each of up to 256 coordinates
STREAM = 0xD1342543DE82EF95  # between the keys of two streams


def mixed(word: int) -> int:
    """Return splitmix64's finaliser of a word of 64 bits."""
    word = (word ^ word >> SHIFTS[0]) * FACTORS[0] & MASK
    word = (word ^ word >> SHIFTS[1]) * FACTORS[1] & MASK
    return word ^ word >> SHIFTS[2]


def unmixed(word: int) -> int:
    """Return the word of 64 bits that :func:`mixed` makes `word` of: all of them have one."""
    word ^= word >> SHIFTS[2] ^ word >> 2 * SHIFTS[2]
    for shift, inverse in zip(SHIFTS[1::-1], INVERSES[::-1], strict=True):
        word = word * inverse & MASK
        word ^= word >> shift ^ word >> 2 * shift
    return word


def key_within(key: int, number: int) -> int:
    """Return the key of a tensor, which has a `number` of 64 bits, under the key of its message."""
    return mixed(key ^ number)


def key_of(*facts: int) -> int:
    """Return a key of 64 bits for integers in [0, 2**64), which other integers, or another order, would not give."""
    key = 0
    for fact in facts:
        key = mixed((key + fact) * GOLDEN + GOLDEN & MASK)
    return key


class Draws(NamedTuple):
    """Random words of some blocks: those from number ``first`` on, under one key."""

    key: int  # 64 bits, see `key_of`
    first: int = 0  # the number of the first block in its tensor

    def after(self, blocks: int) -> Draws:
        """Return the words of the blocks behind the first ``blocks`` of these."""
        return Draws(self.key, self.first + blocks)

    def words(self, blocks: int, stream: int, device: torch.device) -> Tensor:
        """Return the words of so many blocks: int64[blocks, WORDS], of which all bits are random.

        stream: numbered from 0; the words of two streams have nothing in common.
        """
        key = (self.key + stream * STREAM) & MASK
        start = (key + WORDS * self.first * GOLDEN) & MASK
        counter = torch.arange(WORDS * blocks, device=device) * _signed(GOLDEN) + _signed(start)
        for shift, factor in zip(SHIFTS, FACTORS, strict=False):
            counter = (counter ^ _shifted(counter, shift)) * _signed(factor)
        return (counter ^ _shifted(counter, SHIFTS[2])).view(blocks, WORDS)

    def signs(self, blocks: int, size: int, stream: int, device: torch.device) -> Tensor:
        """Return +1 or -1 for each coordinate of so many blocks: float32[blocks, size], size at most 256.

        Coordinate i has -1 where bit i % 64 of word i // 64 is set.
        """
        words = self.words(blocks, stream, device)[:, : size // 64]
        places = torch.arange(64, device=device)
        bits = words.unsqueeze(2) >> places & 1
        return bits.view(blocks, size).to(torch.float32).mul_(-2.0).add_(1.0)

    def uniform(self, blocks: int, size: int, device: torch.device) -> Tensor:
        """Return a number in [0, 1) for each coordinate of so many blocks: float32[blocks, size], size at most 256.

        Multiples of 2**-16: four of a word, the first from its lowest bits.
        """
        words = [self.words(blocks, stream, device) for stream in range(-(-size // (4 * WORDS)))]
        quarters = torch.cat(words, dim=1).unsqueeze(2) >> torch.arange(0, 64, 16, device=device) & 0xFFFF
        return quarters.view(blocks, -1)[:, :size].to(torch.float32).mul_(2.0**-16)


def _signed(word: int) -> int:
    """Return a word of 64 bits as int64 has it."""
    return word - (word >> 63 << 64)


def _shifted(words: Tensor, places: int) -> Tensor:
    """Return int64 ``words`` shifted to the right, with zeros coming in."""
    return words >> places & (1 << (64 - places)) - 1
