# SPDX-License-Identifier: Apache-2.0
"""Write and read the blocks of a tile, in bits of the quantiser `eden`, mixed records among them: the host's bytes.

Mixed records have no way of their own: what differs is chosen coordinate by coordinate, and all are rotated together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsifiers.quantising.draws import FACTORS, FLAT, GOLDEN, LARGEST, NAN, SCALE, SHIFTS, SMALLEST, STREAM

# Rotate blocks with random signs, and add up what is in a block, with the bits of `sparsifiers.quantising`.
#
# A program takes `TILE` coordinates, which are whole blocks. A block has `64 << DOUBLINGS` of them, with 0 to 2 of
# these; so what is the same for a block is kept for each 64 coordinates, a group: [TILE // 64]. Sums and differences
# have the order of `sparsifiers.quantising.eden`.

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


# Blocks as bytes.

_NAN, _SCALE = tl.constexpr(NAN), tl.constexpr(SCALE)
_LEAST, _MOST, _FLAT = (tl.constexpr(one) for one in (SMALLEST, LARGEST, FLAT))


@triton.jit
def power_of_two(exponents: tl.tensor) -> tl.tensor:
    """Return 2**(e - 127), e of 1 to 254: float32."""
    bounded = tl.minimum(tl.maximum(exponents, 1), 254)
    return (bounded << 23).to(tl.float32, bitcast=True)


@triton.jit
def bfloat16_bits(values: tl.tensor) -> tl.tensor:
    """Return the bits of float32 values as bfloat16, to nearest, the even one of two; of NaN always the same."""
    bits = values.to(tl.int32, bitcast=True)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, _NAN, nearest)


@triton.jit
def even_bits(values: tl.tensor) -> tl.tensor:
    """Return the bits of float32 values, none below 0, as bfloat16 of which the last bit is 0, to nearest."""
    bits = values.to(tl.int32, bitcast=True)
    return ((bits + 0xFFFF + ((bits >> 17) & 1)) >> 17) << 1


@triton.jit
def half_of(column: tl.tensor, DOUBLINGS: tl.constexpr) -> tl.tensor:
    """Return in which half of its block each byte of a plane lies, by its number in the block: 0 or 1."""
    return (column >> (2 + DOUBLINGS)) & 1


@triton.jit
def outside_of(key: tl.tensor, first: tl.tensor, DOUBLINGS: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """Return where mixed records of one bit have no value, since they have the other half: int32[TILE], 0 or 1.

    first: the number of the first word of each group's block in the tensor.
    """
    return spread(is_later(key, first), TILE) ^ ((tl.arange(0, TILE) >> (5 + DOUBLINGS)) & 1)


@triton.jit
def turned_twice(
    values: tl.tensor, again: tl.tensor, halves: tl.tensor, key: tl.tensor, word: tl.tensor,
    HALVES: tl.constexpr, BEFORE: tl.constexpr, DOUBLINGS: tl.constexpr, TILE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return blocks rotated, some of them twice: `again`, 0 or 1 of each group. BEFORE: signs stand before a rotation.

    HALVES: of some blocks, `halves` of each coordinate, each half is rotated by itself.
    """
    values = flipped(values, signs(key, word, False, TILE)) if BEFORE else values
    values = rotated(values, halves, HALVES, DOUBLINGS, TILE)
    if tl.max(again, axis=0) > 0:
        twice = rotated(flipped(values, signs(key, word, True, TILE)), halves, HALVES, DOUBLINGS, TILE)
        values = tl.where(spread(again, TILE) > 0, twice, values)
    return values if BEFORE else flipped(values, signs(key, word, False, TILE))


@triton.jit
def level_of(
    number: tl.tensor, BITS: tl.constexpr, LEVELS: tl.constexpr, AT: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Return levels by their numbers: float32[TILE]. AT: where those of `BITS` begin."""
    level = tl.full([TILE], LEVELS[AT], tl.float32)
    for step in tl.static_range((1 << (BITS - 1)) - 1):
        level = tl.where(number > step, tl.full([TILE], LEVELS[AT + step + 1], tl.float32), level)
    return level


@triton.jit
def number_of(
    sizes: tl.tensor, root: tl.tensor, BITS: tl.constexpr, ENDS: tl.constexpr, AT: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Return the numbers of the levels of magnitudes: int32[TILE]."""
    number = tl.zeros([TILE], tl.int32)
    for step in tl.static_range((1 << (BITS - 1)) - 1):
        number += (sizes > root * ENDS[AT + step]).to(tl.int32)
    return number


@triton.jit
def write_blocks(
    values: tl.tensor, gaps: tl.tensor, key: tl.tensor, out: tl.tensor, block: tl.tensor, inside: tl.tensor,
    word: tl.tensor, live: tl.tensor,
    BITS: tl.constexpr, LEVELS: tl.constexpr, ENDS: tl.constexpr, SPIKE: tl.constexpr, DOUBLINGS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Write the records of a tile, of those groups that are `live`; return the sum of its squares, float64.

    gaps: a bit is 1 where a value is 0 and has to be read so, int32[TILE // 64, 8], as `packed` returns them.
    """
    HALVES: tl.constexpr = BITS == 1
    keys = largest(values, DOUBLINGS, TILE).to(tl.int32, bitcast=True)
    exponents = keys >> 23
    # Of bits and not of bytes: what comes of bytes has a layout that keeps a tile eight times.
    any_gap = any_of(tl.max(tl.reshape(unpacked(gaps, TILE), [TILE // 64, 64]), axis=1), DOUBLINGS, TILE)
    is_mixed = (any_gap > 0) & (keys > 0) & (exponents != 255)
    mixes = spread(is_mixed, TILE)
    is_first = live & (inside == 0)
    record = out + block * (_SCALE + BITS * (8 << DOUBLINGS))
    column = inside[:, None] * 8 + tl.arange(0, 8)[None, :]
    front = record[:, None] + _SCALE
    if not HALVES:  # before mixed blocks are rotated, since registers are few then
        tl.store(front + column, (gaps ^ 255).to(tl.uint8), mask=(live & is_mixed)[:, None])
    scaled = values * spread(power_of_two(254 - exponents), TILE)
    energy = folded(scaled * scaled, DOUBLINGS, TILE)
    back = 1023 + 127 - tl.minimum(tl.maximum(254 - exponents, 1), 254)  # squares are of values as they were
    unit = (back.to(tl.int64) << 52).to(tl.float64, bitcast=True)
    total = tl.sum(tl.where(is_first, energy.to(tl.float64) * unit * unit, 0.0), axis=0)
    if HALVES:
        scaled = tl.where(mixes & (outside_of(key, word - inside, DOUBLINGS, TILE) > 0), 0.0, values)
        exponents = largest(scaled, DOUBLINGS, TILE).to(tl.int32, bitcast=True) >> 23
        scaled = scaled * spread(power_of_two(254 - exponents), TILE)
        energy = folded(scaled * scaled, DOUBLINGS, TILE)
    highest = largest(scaled * scaled, DOUBLINGS, TILE)
    size = tl.where(is_mixed, (64 << DOUBLINGS) >> HALVES, 64 << DOUBLINGS).to(tl.float32)
    again = (highest > energy * tl.where(is_mixed, SPIKE[1], SPIKE[0])) & (highest < energy)
    again = again | (highest * size < energy * _FLAT)
    turned = turned_twice(scaled, again.to(tl.int32), mixes, key, word, HALVES, True, DOUBLINGS, TILE)
    root = spread(tl.sqrt_rn(tl.where(again, energy * size, energy)), TILE)
    sizes = tl.abs(turned)
    number = number_of(sizes, root, BITS, ENDS, 0, TILE)
    level = level_of(number, BITS, LEVELS, 0, TILE)
    minus = (turned < 0).to(tl.int32)
    if not HALVES:
        other = number_of(sizes, root, BITS - 1, ENDS, 8, TILE)
        level = tl.where(mixes, level_of(other, BITS - 1, LEVELS, 8, TILE), level)
        number = tl.where(mixes, minus | (other << 1), number)
    scale = tl.div_rn(energy, folded(sizes * level, DOUBLINGS, TILE)) * power_of_two(exponents)
    if HALVES:
        scale = tl.where(is_mixed, scale * 2, scale)
    scale = tl.where(scale >= _LEAST, tl.minimum(scale, _MOST), 0.0)
    head = tl.where(exponents == 255, _NAN, even_bits(scale) | is_mixed.to(tl.int32)) | (again.to(tl.int32) << 15)
    tl.store(record, (head & 255).to(tl.uint8), mask=is_first)
    tl.store(record + 1, ((head >> 8) & 255).to(tl.uint8), mask=is_first)
    here = (live & ~is_mixed)[:, None]
    if HALVES:
        is_here = (live & is_mixed)[:, None] & (half_of(column, DOUBLINGS) == is_later(key, word - inside)[:, None])
        tl.store(front + (column & ~(4 << DOUBLINGS)), (gaps ^ 255).to(tl.uint8), mask=is_here)
        here |= is_here
        column = tl.where(is_mixed[:, None], column | (4 << DOUBLINGS), column)
    tl.store(front + column, packed(minus, TILE).to(tl.uint8), mask=here)
    for plane in tl.static_range(1, BITS):
        place = record[:, None] + (_SCALE + plane * (8 << DOUBLINGS)) + column
        tl.store(place, packed((number >> (plane - 1)) & 1, TILE).to(tl.uint8), mask=live[:, None])
    return total


@triton.jit
def packed(bits: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """Return the bytes of a plane from its bits, int32[TILE], of 0 and 1: int32[TILE // 64, 8]."""
    return tl.sum(tl.reshape(bits, [TILE // 64, 8, 8]) << tl.arange(0, 8)[None, None, :], axis=2)


@triton.jit
def unpacked(packed: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """Return the bits of the bytes of a plane: int32[TILE]."""
    return tl.reshape((packed.to(tl.int32)[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1, [TILE])


@triton.jit
def read_blocks(
    data: tl.tensor, key: tl.tensor, block: tl.tensor, inside: tl.tensor, word: tl.tensor, live: tl.tensor,
    BITS: tl.constexpr, LEVELS: tl.constexpr, DOUBLINGS: tl.constexpr, TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Return the values of a tile of one sender, whose records of the run begin at `data`: float32[TILE].

    And where they are held, int32[TILE // 64, 8] as `packed` returns it: elsewhere 0 is no value, see `Eden._zeros`.
    """
    HALVES: tl.constexpr = BITS == 1
    record = data + block * (_SCALE + BITS * (8 << DOUBLINGS))
    head = tl.load(record, mask=live, other=0).to(tl.int32) | (
        tl.load(record + 1, mask=live, other=0).to(tl.int32) << 8
    )
    column = inside[:, None] * 8 + tl.arange(0, 8)[None, :]
    is_mixed = (head & 1)[:, None] > 0
    front = column
    if HALVES:
        front = tl.where(is_mixed, column | (4 << DOUBLINGS), column)
    front = tl.load(record[:, None] + _SCALE + front, mask=live[:, None], other=0)  # eight coordinates a byte
    minus = unpacked(front, TILE)
    number = tl.zeros([TILE], tl.int32)
    for plane in tl.static_range(1, BITS):
        place = record[:, None] + (_SCALE + plane * (8 << DOUBLINGS)) + column
        number += unpacked(tl.load(place, mask=live[:, None], other=0), TILE) << (plane - 1)
    mixes = spread(head & 1, TILE) > 0
    level = level_of(number, BITS, LEVELS, 0, TILE)
    if not HALVES:
        level = tl.where(mixes, level_of(number >> 1, BITS - 1, LEVELS, 8, TILE), level)
        minus = tl.where(mixes, number & 1, minus)
    read = flipped(level, minus << 31)
    read = turned_twice(read, (head >> 15) & 1, mixes, key, word, HALVES, False, DOUBLINGS, TILE)
    if HALVES:  # what the other half becomes is not used
        front = tl.load(record[:, None] + _SCALE + (column & ~(4 << DOUBLINGS)), mask=live[:, None], other=0)
        is_here = half_of(column, DOUBLINGS) == is_later(key, word - inside)[:, None]
        front = tl.where(is_here, front, 0)
    kept = tl.where(is_mixed, front.to(tl.int32), 255)
    scale = ((head & 0x7FFE) << 16).to(tl.float32, bitcast=True)
    read = tl.where(unpacked(kept, TILE) > 0, read * spread(scale, TILE), 0.0)
    return read, tl.where((head & 0x7FFE)[:, None] != 0, kept, 0)
