# SPDX-License-Identifier: Apache-2.0
"""Words of bitmaps, int32: how many bits are set, and walks from the lowest to the highest of these.

A walk of a tensor of words takes as many turns as the fullest word has bits; in each a lane has one of its own:

    for _ in range(turns(left)):
        bit = lowest(left)          # the word that has this bit alone; 0 of a word that is through
        ... ones_in(bit - 1) ...    # its number, 0 to 31
        left = left & (left - 1)
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ones_in(words: tl.tensor) -> tl.tensor:
    """Return how many bits of each word are set."""
    bits = words.to(tl.uint32, bitcast=True)
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    bits = bits + (bits >> 8)
    return ((bits + (bits >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def lowest(words: tl.tensor) -> tl.tensor:
    """Return each word's lowest bit alone; 0 of 0."""
    return words & (0 - words)


@triton.jit
def turns(words: tl.tensor) -> tl.tensor:
    """Return how many turns a walk takes: the most bits of a word."""
    return tl.max(ones_in(words), 0)
