# SPDX-License-Identifier: Apache-2.0
"""Rotate blocks with random signs, and add up what is in a block, with the bits of `sparsifiers.quantising`.

A program takes `TILE` coordinates, which are whole blocks. A block has `64 << DOUBLINGS` of them, with 0 to 2 of
these; so what is the same for a block is kept for each 64 coordinates, a group: [TILE // 64]. Sums and differences have
the order of `sparsifiers.quantising.eden`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsifiers.quantising.draws import FACTORS, GOLDEN, SHIFTS, STREAM

_GOLDEN, _STREAM = tl.constexpr(GOLDEN), tl.constexpr(STREAM)
_FIRST, _SECOND = (tl.constexpr(one) for one in FACTORS)
_A, _B, _C = (tl.constexpr(one) for one in SHIFTS)


@triton.jit
def mixed(word: tl.tensor) -> tl.tensor:
    """Return `sparsifiers.quantising.draws.mixed` of uint64."""
    word = (word ^ (word >> _A)) * _FIRST
    word = (word ^ (word >> _B)) * _SECOND
    return word ^ (word >> _C)


@triton.jit
def signs(key: tl.tensor, words: tl.tensor, SECOND: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """Return the sign bits of a tile in their places, int32[TILE], of one of two streams of random words.

    key: of the tensor, uint64. words: the number of the word of each group in the tensor, int64[TILE // 64].
    """
    start = key + _STREAM if SECOND else key
    word = mixed(words.to(tl.uint64) * _GOLDEN + start)
    bits = (word[:, None] >> tl.arange(0, 64)[None, :].to(tl.uint64)) & 1
    return tl.reshape(bits.to(tl.int32), [TILE]) << 31


@triton.jit
def is_later(key: tl.tensor, first: tl.tensor) -> tl.tensor:
    """Return whether mixed records of one bit have the second half of their blocks: int32[TILE // 64], 0 or 1.

    first: the number of the first word of each group's block in the tensor.
    """
    return (mixed(first.to(tl.uint64) * _GOLDEN + key + _STREAM + _STREAM) & 1).to(tl.int32)


@triton.jit
def flipped(values: tl.tensor, bits: tl.tensor) -> tl.tensor:
    """Return float32 `values` with another sign where `bits` have one."""
    return (values.to(tl.int32, bitcast=True) ^ bits).to(tl.float32, bitcast=True)


@triton.jit
def butterfly(values: tl.tensor, DISTANCE: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """Return sums and differences of values so far from each other: float32[TILE]."""
    pairs = tl.reshape(values, [TILE // (2 * DISTANCE), 2, DISTANCE])
    left, right = tl.split(tl.permute(pairs, [0, 2, 1]))
    pairs = tl.permute(tl.join(left + right, left - right), [0, 2, 1])
    return tl.reshape(pairs, [TILE])


@triton.jit
def rotated(
    values: tl.tensor, halves: tl.tensor, HALVES: tl.constexpr, DOUBLINGS: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Return the products of the blocks of a tile with the Hadamard matrix: `hadamard` of float32[TILE].

    HALVES: of some blocks, `halves` of each coordinate, each half is rotated by itself.
    """
    for level in tl.static_range(5 + DOUBLINGS):
        values = butterfly(values, 1 << level, TILE)
    whole = butterfly(values, 32 << DOUBLINGS, TILE)
    return tl.where(halves, values, whole) if HALVES else whole


@triton.jit
def any_of(flags: tl.tensor, DOUBLINGS: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """Return the largest of the flags of each block's groups, none below 0: int32[TILE // 64]."""
    if DOUBLINGS > 0:
        flags = larger_of_pairs(flags, 1, TILE // 64)
    if DOUBLINGS > 1:
        flags = larger_of_pairs(flags, 2, TILE // 64)
    return flags


@triton.jit
def halved(values: tl.tensor, DISTANCE: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """Return the sums of values so far from each other, for both: float32[TILE]."""
    pairs = tl.reshape(values, [TILE // (2 * DISTANCE), 2, DISTANCE])
    left, right = tl.split(tl.permute(pairs, [0, 2, 1]))
    total = left + right
    return tl.reshape(tl.permute(tl.join(total, total), [0, 2, 1]), [TILE])


@triton.jit
def folded(values: tl.tensor, DOUBLINGS: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """Return the sums of the blocks of a tile, none below 0, halves added: float32[TILE // 64].

    All coordinates get the sum: that has a butterfly's layout, and needs few registers.
    """
    if DOUBLINGS > 1:
        values = halved(values, 128, TILE)
    if DOUBLINGS > 0:
        values = halved(values, 64, TILE)
    for level in tl.static_range(6):
        values = halved(values, 32 >> level, TILE)
    return keys_of_groups(values, TILE).to(tl.float32, bitcast=True)


@triton.jit
def keys_of_groups(values: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """Return the bits of the largest magnitude of each group: int32[TILE // 64]. NaN is above all."""
    return tl.max(tl.reshape(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, [TILE // 64, 64]), axis=1)


@triton.jit
def larger_of_pairs(keys: tl.tensor, DISTANCE: tl.constexpr, GROUPS: tl.constexpr) -> tl.tensor:
    """Return the larger of two keys so far from each other, for both: int32[GROUPS]."""
    larger = tl.max(tl.reshape(keys, [GROUPS // (2 * DISTANCE), 2, DISTANCE]), axis=1)
    shape: tl.constexpr = [GROUPS // (2 * DISTANCE), 2, DISTANCE]
    return tl.reshape(tl.broadcast_to(larger[:, None, :], shape), [GROUPS])


@triton.jit
def largest(values: tl.tensor, DOUBLINGS: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """Return the largest magnitude of each block of a tile: float32[TILE // 64]. NaN is above all."""
    return any_of(keys_of_groups(values, TILE), DOUBLINGS, TILE).to(tl.float32, bitcast=True)


@triton.jit
def spread(values: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """Return a value of each group for each of its coordinates: [TILE]."""
    return tl.reshape(tl.broadcast_to(values[:, None], [TILE // 64, 64]), [TILE])
