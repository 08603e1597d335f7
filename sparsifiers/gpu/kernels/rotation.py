# SPDX-License-Identifier: Apache-2.0
"""Write and read rotated blocks in a few bits each: the quantiser `eden`, with the bits of `sparsifiers.quantising`.

A program takes `TILE` coordinates, which are whole blocks of `SIZE`. Sums and differences have the order of
`sparsifiers.quantising.rotation`; quotients and roots are rounded to nearest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsifiers.gpu.kernels.launching import launch
from sparsifiers.gpu.sending import send
from sparsifiers.quantising import levels
from sparsifiers.quantising.draws import FACTORS, GOLDEN, MASK, SHIFTS, STREAM, WORDS, Draws
from sparsifiers.quantising.scales import NAN, SCALE

TILE = 2048  # coordinates of a program: 8 a thread
STREAMS = 2  # of random signs: one for each rotation of a block
_GOLDEN, _WORDS, _NAN, _SCALE = (tl.constexpr(one) for one in (GOLDEN, WORDS, NAN, SCALE))
_FIRST, _SECOND = (tl.constexpr(one) for one in FACTORS)
_A, _B, _C = (tl.constexpr(one) for one in SHIFTS)
_LEAST, _MOST = tl.constexpr(levels.LEAST), tl.constexpr(levels.MOST)
# By bits: levels, and the ends of all but the last; as constants, of which unused ones are 0.
_LEVELS = {bits: (*some, *[0] * (8 - len(some))) for bits, some in levels.LEVELS.items()}
_ENDS = {bits: (*levels.thresholds(bits), *[0.0] * (8 - len(some))) for bits, some in levels.LEVELS.items()}


@triton.jit
def joined(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Return a word of 64 bits, of which the halves are given as int32: int64."""
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def signs(low: tl.tensor, high: tl.tensor, block: tl.tensor, SIZE: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """Return the sign bits of a tile in their places, int32[TILE]: of random words from the number `high:low` on.

    block: the number of each block behind those, int64[TILE // SIZE].
    """
    start = joined(low, high)
    number = block[:, None] * _WORDS + tl.arange(0, SIZE // 64)[None, :]
    word = number.to(tl.uint64) * _GOLDEN + start.to(tl.uint64)
    word = (word ^ (word >> _A)) * _FIRST
    word = (word ^ (word >> _B)) * _SECOND
    word = word ^ (word >> _C)
    bits = (word[:, :, None] >> tl.arange(0, 64)[None, None, :].to(tl.uint64)) & 1
    return tl.reshape(bits.to(tl.int32), [TILE]) << 31


@triton.jit
def flipped(values: tl.tensor, bits: tl.tensor) -> tl.tensor:
    """Return float32 `values` with another sign where `bits` have one."""
    return (values.to(tl.int32, bitcast=True) ^ bits).to(tl.float32, bitcast=True)


@triton.jit
def rotated(values: tl.tensor, SIZE: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """Return the products of the blocks of a tile with the Hadamard matrix: `hadamard` of float32[TILE]."""
    for level in tl.static_range(8):
        if (2 << level) <= SIZE:
            pairs = tl.reshape(values, [TILE // (2 << level), 2, 1 << level])
            left, right = tl.split(tl.permute(pairs, [0, 2, 1]))
            pairs = tl.permute(tl.join(left + right, left - right), [0, 2, 1])
            values = tl.reshape(pairs, [TILE])
    return values


@triton.jit
def folded(values: tl.tensor, SIZE: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """Return the sums of the blocks of a tile, none below 0, halves added: float32[TILE // SIZE].

    All coordinates get the sum: that has a butterfly's layout, and needs few registers.
    """
    for level in tl.static_range(8):
        if (2 << level) <= SIZE:
            halves = tl.reshape(values, [(TILE // SIZE) << level, 2, SIZE >> (level + 1)])
            left, right = tl.split(tl.permute(halves, [0, 2, 1]))
            total = left + right
            values = tl.reshape(tl.permute(tl.join(total, total), [0, 2, 1]), [TILE])
    return largest(values, SIZE, TILE)


@triton.jit
def largest(values: tl.tensor, SIZE: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """Return the largest value of each block of a tile, none below 0: float32[TILE // SIZE]. NaN is above all."""
    keys = tl.reshape(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, [TILE // SIZE, SIZE])
    return tl.max(keys, axis=1).to(tl.float32, bitcast=True)


@triton.jit
def spread(values: tl.tensor, SIZE: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """Return a value of each block for each of its coordinates: [TILE]."""
    return tl.reshape(tl.broadcast_to(values[:, None], [TILE // SIZE, SIZE]), [TILE])


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
def write_blocks(
    values: tl.tensor, block: tl.tensor, live: tl.tensor, low0: tl.tensor, high0: tl.tensor, low1: tl.tensor,
    high1: tl.tensor, out: tl.tensor,
    BITS: tl.constexpr, LEVELS: tl.constexpr, ENDS: tl.constexpr, SPIKE: tl.constexpr, SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Write the records of a tile, of those blocks that are `live`; return the sum of its squares, float64."""
    BLOCKS: tl.constexpr = TILE // SIZE
    exponents = largest(tl.abs(values), SIZE, TILE).to(tl.int32, bitcast=True) >> 23
    values = values * spread(power_of_two(254 - exponents), SIZE, TILE)
    squares = values * values
    energy = folded(squares, SIZE, TILE)
    highest = largest(squares, SIZE, TILE)
    again = (highest > energy * SPIKE) & (highest < energy)
    turned = rotated(flipped(values, signs(low0, high0, block, SIZE, TILE)), SIZE, TILE)
    if tl.max(again.to(tl.int32), axis=0) > 0:
        twice = rotated(flipped(turned, signs(low1, high1, block, SIZE, TILE)), SIZE, TILE)
        turned = tl.where(spread(again, SIZE, TILE), twice, turned)
    root = spread(tl.sqrt_rn(tl.where(again, energy * SIZE, energy)), SIZE, TILE)
    sizes = tl.abs(turned)
    number = tl.zeros([TILE], tl.int32)
    level = tl.full([TILE], LEVELS[0], tl.float32)
    for step in tl.static_range((1 << (BITS - 1)) - 1):
        above = sizes > root * ENDS[step]
        number += above.to(tl.int32)
        level = tl.where(above, tl.full([TILE], LEVELS[step + 1], tl.float32), level)
    scale = tl.div_rn(energy, folded(sizes * level, SIZE, TILE)) * power_of_two(exponents)
    scale = tl.where(scale >= _LEAST, tl.minimum(scale, _MOST), 0.0)
    scale = tl.where(exponents == 255, float("nan"), scale)
    head = bfloat16_bits(scale) | (again.to(tl.int32) << 15)
    record = out + block * (_SCALE + BITS * SIZE // 8)
    tl.store(record, (head & 255).to(tl.uint8), mask=live)
    tl.store(record + 1, ((head >> 8) & 255).to(tl.uint8), mask=live)
    column = tl.arange(0, SIZE // 8)[None, :]
    for plane in tl.static_range(BITS):
        bits = (turned < 0).to(tl.int32) if plane == 0 else (number >> (plane - 1)) & 1
        packed = tl.sum(tl.reshape(bits, [BLOCKS, SIZE // 8, 8]) << tl.arange(0, 8)[None, None, :], axis=2)
        place = record[:, None] + (_SCALE + plane * (SIZE // 8)) + column
        tl.store(place, packed.to(tl.uint8), mask=live[:, None])
    back = 1023 + 127 - tl.minimum(tl.maximum(254 - exponents, 1), 254)  # squares are of values as they were
    unit = (back.to(tl.int64) << 52).to(tl.float64, bitcast=True)
    return tl.sum(energy.to(tl.float64) * unit * unit, axis=0)


@triton.jit
def read_blocks(
    sender: tl.tensor, block: tl.tensor, live: tl.tensor,
    BITS: tl.constexpr, LEVELS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the values of a tile of one sender: float32[TILE]. `sender`: its row of the table, int32[6]."""
    data = joined(tl.load(sender), tl.load(sender + 1)).to(tl.pointer_type(tl.uint8))
    record = data + block * (_SCALE + BITS * SIZE // 8)
    head = tl.load(record, mask=live, other=0).to(tl.int32) | (
        tl.load(record + 1, mask=live, other=0).to(tl.int32) << 8
    )
    column = tl.arange(0, SIZE // 8)[None, :]
    number = tl.zeros([TILE], tl.int32)
    minus = tl.zeros([TILE], tl.int32)
    for plane in tl.static_range(BITS):
        place = record[:, None] + (_SCALE + plane * (SIZE // 8)) + column
        packed = tl.load(place, mask=live[:, None], other=0).to(tl.int32)
        bits = tl.reshape((packed[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1, [TILE])
        if plane == 0:
            minus = bits << 31
        else:
            number += bits << (plane - 1)
    level = tl.full([TILE], LEVELS[0], tl.float32)
    for step in tl.static_range((1 << (BITS - 1)) - 1):
        level = tl.where(number > step, tl.full([TILE], LEVELS[step + 1], tl.float32), level)
    read = rotated(flipped(level, minus), SIZE, TILE)
    again = (head >> 15) & 1
    if tl.max(again, axis=0) > 0:
        second = signs(tl.load(sender + 4), tl.load(sender + 5), block, SIZE, TILE)
        twice = rotated(flipped(read, second), SIZE, TILE)
        read = tl.where(spread(again, SIZE, TILE) > 0, twice, read)
    read = flipped(read, signs(tl.load(sender + 2), tl.load(sender + 3), block, SIZE, TILE))
    scale = ((head & 0x7FFF) << 16).to(tl.float32, bitcast=True)
    return read * spread(scale, SIZE, TILE)


@triton.jit
def sum_of(
    table: tl.tensor, senders: tl.tensor, scale: tl.tensor, block: tl.tensor, live: tl.tensor,
    BITS: tl.constexpr, LEVELS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return `scale` times the sum of the values of a tile of all senders, in their order: float32[TILE]."""
    total = read_blocks(table, block, live, BITS, LEVELS, SIZE, TILE)
    for sender in range(1, senders):
        total += read_blocks(table + 6 * sender, block, live, BITS, LEVELS, SIZE, TILE)
    return total * scale


@triton.jit
def store_values(out: tl.tensor, values: tl.tensor, place: tl.tensor, length: tl.tensor, IS_BF16: tl.constexpr) -> None:
    """Write values in the dtype of `out`, of which bfloat16 is given as int16."""
    if IS_BF16:
        tl.store(out + place, bfloat16_bits(values).to(tl.int16), mask=place < length)
    else:
        tl.store(out + place, values.to(out.dtype.element_ty), mask=place < length)


@triton.jit(do_not_specialize=["low0", "high0", "low1", "high1", "blocks", "length"])
def eden_encode_kernel(
    values: tl.tensor, out: tl.tensor, squares: tl.tensor, length: tl.tensor, blocks: tl.tensor,
    low0: tl.tensor, high0: tl.tensor, low1: tl.tensor, high1: tl.tensor,
    BITS: tl.constexpr, LEVELS: tl.constexpr, ENDS: tl.constexpr, SPIKE: tl.constexpr, SQUARES: tl.constexpr,
    SIZE: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Write the records of one tile."""
    block = tl.program_id(0).to(tl.int64) * (TILE // SIZE) + tl.arange(0, TILE // SIZE)
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    given = tl.load(values + place, mask=place < length, other=0.0).to(tl.float32)
    found = write_blocks(
        given, block, block < blocks, low0, high0, low1, high1, out, BITS, LEVELS, ENDS, SPIKE, SIZE, TILE
    )
    if SQUARES:
        tl.atomic_add(squares, found, sem="relaxed")


@triton.jit(do_not_specialize=["senders", "blocks", "length"])
def eden_decode_kernel(
    table: tl.tensor, senders: tl.tensor, scale: tl.tensor, out: tl.tensor, length: tl.tensor,
    blocks: tl.tensor,
    BITS: tl.constexpr, LEVELS: tl.constexpr, IS_BF16: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Write the sum of one tile of all senders."""
    block = tl.program_id(0).to(tl.int64) * (TILE // SIZE) + tl.arange(0, TILE // SIZE)
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    total = sum_of(table, senders, scale, block, block < blocks, BITS, LEVELS, SIZE, TILE)
    store_values(out, total, place, length, IS_BF16)


@triton.jit(do_not_specialize=["senders", "low0", "high0", "low1", "high1", "blocks"])
def eden_encode_sum_kernel(
    table: tl.tensor, senders: tl.tensor, scale: tl.tensor, out: tl.tensor, blocks: tl.tensor,
    low0: tl.tensor, high0: tl.tensor, low1: tl.tensor, high1: tl.tensor,
    FROM: tl.constexpr, FROM_LEVELS: tl.constexpr,
    BITS: tl.constexpr, LEVELS: tl.constexpr, ENDS: tl.constexpr, SPIKE: tl.constexpr,
    SIZE: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Write the records of the sum of one tile of all senders."""
    block = tl.program_id(0).to(tl.int64) * (TILE // SIZE) + tl.arange(0, TILE // SIZE)
    live = block < blocks
    total = sum_of(table, senders, scale, block, live, FROM, FROM_LEVELS, SIZE, TILE)
    write_blocks(total, block, live, low0, high0, low1, high1, out, BITS, LEVELS, ENDS, SPIKE, SIZE, TILE)


def encode(values: Tensor, size: int, draws: Draws, out: Tensor, squares: Tensor | None, bits: int) -> None:
    """Launch the kernel of `sparsifiers.gpu.rotation.encode`."""
    blocks = -(-values.numel() // size)
    launch(
        eden_encode_kernel, -(-blocks * size // TILE), out,
        values, out, out if squares is None else squares, values.numel(), blocks, *_halves(*_starts(draws)),
        **_levels(bits), SQUARES=squares is not None, SIZE=size, TILE=TILE,
    )  # fmt: skip


def decode_sum(
    messages: Sequence[Tensor], draws: Sequence[Draws], size: int, scale: float, out: Tensor, bits: int
) -> None:
    """Launch the kernel of `sparsifiers.gpu.rotation.decode_sum`."""
    blocks, is_bf16 = -(-out.numel() // size), out.dtype == torch.bfloat16
    launch(
        eden_decode_kernel, -(-blocks * size // TILE), out,
        *_senders(messages, draws), scale, out.view(torch.int16) if is_bf16 else out, out.numel(), blocks,
        BITS=bits, LEVELS=_LEVELS[bits], IS_BF16=is_bf16, SIZE=size, TILE=TILE,
    )  # fmt: skip


def encode_sum(
    messages: Sequence[Tensor], draws: Sequence[Draws], size: int, scale: float, own: Draws, out: Tensor,
    bits: int, second: int, blocks: int,
) -> None:  # fmt: skip
    """Launch the kernel of `sparsifiers.gpu.rotation.encode_sum`."""
    launch(
        eden_encode_sum_kernel, -(-blocks * size // TILE), out,
        *_senders(messages, draws), scale, out, blocks, *_halves(*_starts(own)),
        FROM=bits, FROM_LEVELS=_LEVELS[bits], **_levels(second), SIZE=size, TILE=TILE,
    )  # fmt: skip


def _levels(bits: int) -> dict[str, object]:
    """Return the constants of a quantiser that writes."""
    return {"BITS": bits, "LEVELS": _LEVELS[bits], "ENDS": _ENDS[bits], "SPIKE": levels.SPIKE[bits]}


def _senders(messages: Sequence[Tensor], draws: Sequence[Draws]) -> tuple[Tensor, int]:
    """Return a table, int32[senders, 6], of which a copy is queued, and how many senders there are.

    A row: the halves of the message's address, and of the word where each stream's random numbers begin.
    """
    rows = [_halves(message.data_ptr(), *_starts(one)) for message, one in zip(messages, draws, strict=True)]
    table = torch.empty(len(rows), len(rows[0]), dtype=torch.int32, device=messages[0].device)
    return send(rows, table), len(rows)


def _starts(draws: Draws) -> list[int]:
    """Return the word at which the random numbers of each stream begin."""
    return [(draws.key + stream * STREAM + WORDS * draws.first * GOLDEN) & MASK for stream in range(STREAMS)]


def _halves(*words: int) -> tuple[int, ...]:
    """Return the lower and the upper half of each word of 64 bits, as int32 has them.

    As integers of 64 bits they would have, by their values, other types and alignments, and kernels for each.
    """
    halves = [half for word in words for half in (word & 0xFFFFFFFF, word >> 32)]
    return tuple(half - (half >> 31 << 32) for half in halves)
