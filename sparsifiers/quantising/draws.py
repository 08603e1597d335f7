# SPDX-License-Identifier: Apache-2.0
"""Random words that every rank can draw for any block of any tensor, by themselves and in any order.

A word is a pure function of a key and a number: splitmix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
Generators", OOPSLA 2014), at any value of its counter. No generator of the process is used, and torch's operations and
compiled loops draw the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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


@dataclass(frozen=True)
class Draws:
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
