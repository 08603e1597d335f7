# SPDX-License-Identifier: Apache-2.0
"""Write and read the records of many tensors in one launch: the quantiser `eden`, with the host's bytes.

Quotients and roots are rounded to nearest, scales by integers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsifiers.gpu.block_table import FIELDS, TILE, BlockTable
from sparsifiers.gpu.kernels.launching import launch
from sparsifiers.gpu.kernels.rotation import (
    any_of,
    exchanged,
    flipped,
    folded,
    is_later,
    largest,
    mixed,
    rotated,
    signs,
    spread,
)  # fmt: skip
from sparsifiers.quantising import levels
from sparsifiers.quantising.draws import WORDS
from sparsifiers.quantising.scales import NAN, SCALE

REGISTERS = 128  # of a thread, at most: so two programs have room in a processor
DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_WORDS, _NAN, _SCALE, _FIELDS = (tl.constexpr(one) for one in (WORDS, NAN, SCALE, len(FIELDS)))
_LEAST, _MOST, _FLAT = (tl.constexpr(one) for one in (levels.LEAST, levels.MOST, levels.FLAT))
# By bits: levels, and the ends of all but the last; as constants, of which unused ones are 0.
_OWN_LEVELS = {bits: (*some, *[0] * (8 - len(some))) for bits, some in levels.LEVELS.items()}
_OWN_ENDS = {bits: (*levels.thresholds(bits), *[0.0] * (9 - len(some))) for bits, some in levels.LEVELS.items()}
# Behind each eight those of one bit less, for mixed records.
_LEVELS, _ENDS = (
    {bits: own[bits] + own[max(bits - 1, 1)] for bits in levels.LEVELS} for own in (_OWN_LEVELS, _OWN_ENDS)
)
_SPIKE = {bits: (levels.SPIKE[bits], levels.SPIKE[max(bits - 1, 1)]) for bits in levels.LEVELS}


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
def outside_of(key: tl.tensor, first: tl.tensor, DOUBLINGS: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """Return where mixed records of one bit have no value, since they have the other half: int32[TILE], 0 or 1.

    first: the number of the first word of each group's block in the tensor.
    """
    return spread(is_later(key, first), TILE) ^ half_of(DOUBLINGS, TILE)


@triton.jit
def half_of(DOUBLINGS: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """Return in which half of its block each coordinate of a tile lies: int32[TILE], 0 or 1."""
    return (tl.arange(0, TILE) >> (5 + DOUBLINGS)) & 1


@triton.jit
def row_of(table: tl.tensor, runs: tl.tensor, steps: tl.tensor) -> tl.tensor:
    """Return where the row of this program's run begins in the table, see `BlockTable`: by bisection."""
    program = tl.program_id(0).to(tl.int64)
    low = runs * 0
    high = runs - 1
    for _ in range(steps):
        middle = (low + high + 1) // 2
        is_later = tl.load(table + _FIELDS * middle) > program
        low = tl.where(is_later, low, middle)
        high = tl.where(is_later, middle - 1, high)
    return table + _FIELDS * low


@triton.jit
def groups_of(row: tl.tensor, DOUBLINGS: tl.constexpr, TILE: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Return of a program: its number in the run, and of each group block, place in it, word, and whether it is there.

    Blocks are counted from the first of the run, int64[TILE // 64]; words from the first of the tensor.
    """
    task = tl.program_id(0).to(tl.int64) - tl.load(row)
    group = tl.arange(0, TILE // 64)
    block = task * ((TILE // 64) >> DOUBLINGS) + (group >> DOUBLINGS)
    inside = group & ((1 << DOUBLINGS) - 1)
    word = (tl.load(row + 2) + block) * _WORDS + inside
    return task, block, inside, word, block < tl.load(row + 3)


@triton.jit
def key_of(keys: tl.tensor, row: tl.tensor) -> tl.tensor:
    """Return the key of this program's tensor under a key of a message: uint64."""
    return mixed((tl.load(keys) ^ tl.load(row + 1)).to(tl.uint64))


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

    gaps: 1 where a value is 0 and has to be read so, int32[TILE].
    """
    GROUPS: tl.constexpr = TILE // 64
    HALVES: tl.constexpr = BITS == 1
    keys = largest(values, DOUBLINGS, TILE).to(tl.int32, bitcast=True)
    exponents = keys >> 23
    is_mixed = (any_of(gaps, DOUBLINGS, TILE) > 0) & (keys > 0) & (exponents != 255)
    mixes = spread(is_mixed, TILE)
    is_first = live & (inside == 0)
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
    kept = 1 - gaps
    if HALVES:
        later = spread(is_later(key, word - inside), TILE) > 0
        first = tl.where(later, exchanged(kept, DOUBLINGS, TILE), kept)
        second = tl.where(later, minus, exchanged(minus, DOUBLINGS, TILE))
        minus = tl.where(mixes, tl.where(half_of(DOUBLINGS, TILE) > 0, second, first), minus)
    else:
        other = number_of(sizes, root, BITS - 1, ENDS, 8, TILE)
        level = tl.where(mixes, level_of(other, BITS - 1, LEVELS, 8, TILE), level)
        number = tl.where(mixes, minus | (other << 1), number)
        minus = tl.where(mixes, kept, minus)
    scale = tl.div_rn(energy, folded(sizes * level, DOUBLINGS, TILE)) * power_of_two(exponents)
    if HALVES:
        scale = tl.where(is_mixed, scale * 2, scale)
    scale = tl.where(scale >= _LEAST, tl.minimum(scale, _MOST), 0.0)
    head = tl.where(exponents == 255, _NAN, even_bits(scale) | is_mixed.to(tl.int32)) | (again.to(tl.int32) << 15)
    record = out + block * (_SCALE + BITS * (8 << DOUBLINGS))
    tl.store(record, (head & 255).to(tl.uint8), mask=is_first)
    tl.store(record + 1, ((head >> 8) & 255).to(tl.uint8), mask=is_first)
    column = inside[:, None] * 8 + tl.arange(0, 8)[None, :]
    for plane in tl.static_range(BITS):
        bits = minus if plane == 0 else (number >> (plane - 1)) & 1
        packed = tl.sum(tl.reshape(bits, [GROUPS, 8, 8]) << tl.arange(0, 8)[None, None, :], axis=2)
        place = record[:, None] + (_SCALE + plane * (8 << DOUBLINGS)) + column
        tl.store(place, packed.to(tl.uint8), mask=live[:, None])
    return total


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

    And where they are held, int32[TILE]: elsewhere 0 is no value, see `Eden._zeros`.
    """
    HALVES: tl.constexpr = BITS == 1
    record = data + block * (_SCALE + BITS * (8 << DOUBLINGS))
    head = tl.load(record, mask=live, other=0).to(tl.int32) | (
        tl.load(record + 1, mask=live, other=0).to(tl.int32) << 8
    )
    column = inside[:, None] * 8 + tl.arange(0, 8)[None, :]
    number = tl.zeros([TILE], tl.int32)
    front = tl.load(record[:, None] + _SCALE + column, mask=live[:, None], other=0)  # eight coordinates a byte
    minus = unpacked(front, TILE)
    for plane in tl.static_range(1, BITS):
        place = record[:, None] + (_SCALE + plane * (8 << DOUBLINGS)) + column
        number += unpacked(tl.load(place, mask=live[:, None], other=0), TILE) << (plane - 1)
    mixes = spread(head & 1, TILE) > 0
    level = level_of(number, BITS, LEVELS, 0, TILE)
    if HALVES:
        later = spread(is_later(key, word - inside), TILE) > 0
        outside = outside_of(key, word - inside, DOUBLINGS, TILE)
        level = tl.where(mixes & (outside > 0), 0.0, level)
        minus = tl.where(mixes & ~later, exchanged(minus, DOUBLINGS, TILE), minus)
    else:
        level = tl.where(mixes, level_of(number >> 1, BITS - 1, LEVELS, 8, TILE), level)
        minus = tl.where(mixes, number & 1, minus)
    read = flipped(level, minus << 31)
    read = turned_twice(read, (head >> 15) & 1, mixes, key, word, HALVES, False, DOUBLINGS, TILE)
    scale = ((head & 0x7FFE) << 16).to(tl.float32, bitcast=True)
    kept = unpacked(front, TILE)  # again, and not kept: registers are few
    if HALVES:
        kept = tl.where(spread(is_later(key, word - inside), TILE) > 0, exchanged(kept, DOUBLINGS, TILE), kept)
        kept *= 1 - outside_of(key, word - inside, DOUBLINGS, TILE)
    kept = tl.where(spread(head & 1, TILE) > 0, kept, 1)
    read = tl.where(kept > 0, read * spread(scale, TILE), 0.0)
    return read, kept * spread(((head & 0x7FFE) != 0).to(tl.int32), TILE)


@triton.jit
def encode_tile(
    table: tl.tensor, runs: tl.tensor, row: tl.tensor, out: tl.tensor, squares: tl.tensor,
    FROM: tl.constexpr, SQUARES: tl.constexpr,
    BITS: tl.constexpr, LEVELS: tl.constexpr, ENDS: tl.constexpr, SPIKE: tl.constexpr, DOUBLINGS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Write the records of one tile of a tensor; without one, of zeros."""
    task, block, inside, word, live = groups_of(row, DOUBLINGS, TILE)
    address = tl.load(row + 6)
    place = task * TILE + tl.arange(0, TILE)
    length = tl.where(address != 0, tl.load(row + 5), 0)
    values = tl.load(address.to(tl.pointer_type(FROM)) + place, mask=place < length, other=0.0).to(tl.float32)
    gaps = ((values == 0.0) & (place < length)).to(tl.int32)
    found = write_blocks(
        values, gaps, key_of(table + _FIELDS * runs, row), out + tl.load(row + 7), block, inside, word, live,
        BITS, LEVELS, ENDS, SPIKE, DOUBLINGS, TILE,
    )  # fmt: skip
    if SQUARES:
        tl.atomic_add(squares, found, sem="relaxed")


@triton.jit
def sum_of(
    table: tl.tensor, runs: tl.tensor, row: tl.tensor, rows: tl.tensor, stride: tl.tensor, senders: tl.tensor,
    scale: tl.tensor, block: tl.tensor, inside: tl.tensor, word: tl.tensor, live: tl.tensor,
    BITS: tl.constexpr, LEVELS: tl.constexpr, DOUBLINGS: tl.constexpr, TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Return `scale` times the sum of the values of a tile of all senders, in their order: float32[TILE].

    And where one of them is held, int32[TILE], see `read_blocks`.
    """
    data = rows + tl.load(row + 6)
    keys = table + _FIELDS * runs
    total, held = read_blocks(data, key_of(keys, row), block, inside, word, live, BITS, LEVELS, DOUBLINGS, TILE)
    for sender in range(1, senders):
        data += stride
        read, some = read_blocks(
            data, key_of(keys + sender, row), block, inside, word, live, BITS, LEVELS, DOUBLINGS, TILE
        )  # fmt: skip
        total += read
        held |= some
    return total * scale, held


@triton.jit
def decode_tile(
    table: tl.tensor, runs: tl.tensor, row: tl.tensor, rows: tl.tensor, stride: tl.tensor, senders: tl.tensor,
    scale: tl.tensor,
    TO: tl.constexpr, BITS: tl.constexpr, LEVELS: tl.constexpr, DOUBLINGS: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Write the sum of one tile of all senders to its tensor. `TO`: its dtype, but for bfloat16 int16."""
    task, block, inside, word, live = groups_of(row, DOUBLINGS, TILE)
    total, _ = sum_of(
        table, runs, row, rows, stride, senders, scale, block, inside, word, live, BITS, LEVELS, DOUBLINGS, TILE
    )  # fmt: skip
    place = task * TILE + tl.arange(0, TILE)
    out = tl.load(row + 7).to(tl.pointer_type(TO)) + place
    within = place < tl.load(row + 5)
    if TO == tl.int16:
        tl.store(out, bfloat16_bits(total).to(tl.int16), mask=within)
    else:
        tl.store(out, total.to(TO), mask=within)


@triton.jit
def encode_sum_tile(
    table: tl.tensor, runs: tl.tensor, row: tl.tensor, rows: tl.tensor, stride: tl.tensor, senders: tl.tensor,
    scale: tl.tensor, out: tl.tensor,
    FROM: tl.constexpr, FROM_LEVELS: tl.constexpr,
    BITS: tl.constexpr, LEVELS: tl.constexpr, ENDS: tl.constexpr, SPIKE: tl.constexpr, DOUBLINGS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Write the records of the sum of one tile of all senders. The last key is that of what is written."""
    _, block, inside, word, live = groups_of(row, DOUBLINGS, TILE)
    total, held = sum_of(
        table, runs, row, rows, stride, senders, scale, block, inside, word, live, FROM, FROM_LEVELS, DOUBLINGS, TILE
    )  # fmt: skip
    key = key_of(table + _FIELDS * runs + senders, row)
    write_blocks(
        total, 1 - held, key, out + tl.load(row + 7), block, inside, word, live, BITS, LEVELS, ENDS, SPIKE, DOUBLINGS,
        TILE,
    )  # fmt: skip


# A program takes the way of its run's blocks; ways that no run takes are left out: SIZES is the sum of those there are.


@triton.jit(do_not_specialize=["runs", "steps"])
def eden_encode_kernel(
    table: tl.tensor, runs: tl.tensor, steps: tl.tensor, out: tl.tensor, squares: tl.tensor,
    FROM: tl.constexpr, SQUARES: tl.constexpr,
    BITS: tl.constexpr, LEVELS: tl.constexpr, ENDS: tl.constexpr, SPIKE: tl.constexpr, SIZES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Write the records of tensors, a tile a program."""
    row = row_of(table, runs, steps)
    size = tl.load(row + 4)
    for doublings in tl.static_range(3):
        if SIZES & (64 << doublings):
            if size == 64 << doublings:
                encode_tile(
                    table, runs, row, out, squares, FROM, SQUARES, BITS, LEVELS, ENDS, SPIKE, doublings, TILE
                )  # fmt: skip


@triton.jit(do_not_specialize=["runs", "steps", "senders", "stride"])
def eden_decode_kernel(
    table: tl.tensor, runs: tl.tensor, steps: tl.tensor, rows: tl.tensor, stride: tl.tensor, senders: tl.tensor,
    scale: tl.tensor,
    TO: tl.constexpr, BITS: tl.constexpr, LEVELS: tl.constexpr, SIZES: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Write the sums of all senders to tensors, a tile a program."""
    row = row_of(table, runs, steps)
    size = tl.load(row + 4)
    for doublings in tl.static_range(3):
        if SIZES & (64 << doublings):
            if size == 64 << doublings:
                decode_tile(table, runs, row, rows, stride, senders, scale, TO, BITS, LEVELS, doublings, TILE)


@triton.jit(do_not_specialize=["runs", "steps", "senders", "stride"])
def eden_encode_sum_kernel(
    table: tl.tensor, runs: tl.tensor, steps: tl.tensor, rows: tl.tensor, stride: tl.tensor, senders: tl.tensor,
    scale: tl.tensor, out: tl.tensor,
    FROM: tl.constexpr, FROM_LEVELS: tl.constexpr,
    BITS: tl.constexpr, LEVELS: tl.constexpr, ENDS: tl.constexpr, SPIKE: tl.constexpr, SIZES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Write the records of the sums of all senders, a tile a program."""
    row = row_of(table, runs, steps)
    size = tl.load(row + 4)
    for doublings in tl.static_range(3):
        if SIZES & (64 << doublings):
            if size == 64 << doublings:
                encode_sum_tile(
                    table, runs, row, rows, stride, senders, scale, out, FROM, FROM_LEVELS,
                    BITS, LEVELS, ENDS, SPIKE, doublings, TILE,
                )  # fmt: skip


def encode(
    table: BlockTable, values: Sequence[Tensor | None], key: int, out: Tensor, squares: Tensor | None, bits: int
) -> None:
    """Launch the kernel of `sparsifiers.gpu.records.encode`. `values`: of one dtype."""
    given = table.send(out.device, [key], sources=_addresses(values))
    dtype = next((one.dtype for one in values if one is not None), torch.float32)
    launch(
        eden_encode_kernel, table.programs, out,
        given, *_runs(table), out, out if squares is None else squares,
        FROM=DTYPES[dtype], SQUARES=squares is not None, **_levels(bits),
        SIZES=table.sizes, TILE=TILE, maxnreg=REGISTERS,
    )  # fmt: skip


def decode_sum(
    table: BlockTable, rows: Tensor, keys: Sequence[int], scale: float, outs: Sequence[Tensor], bits: int
) -> None:
    """Launch the kernel of `sparsifiers.gpu.records.decode_sum`. `outs`: of one dtype."""
    given, dtype = table.send(rows.device, keys, targets=_addresses(outs)), outs[0].dtype
    launch(
        eden_decode_kernel, table.programs, rows,
        given, *_runs(table), rows, rows.stride(0), len(rows), scale,
        TO=tl.int16 if dtype == torch.bfloat16 else DTYPES[dtype], BITS=bits, LEVELS=_LEVELS[bits],
        SIZES=table.sizes, TILE=TILE, maxnreg=REGISTERS,
    )  # fmt: skip


def encode_sum(
    table: BlockTable, rows: Tensor, keys: Sequence[int], scale: float, own: int, out: Tensor, bits: int, second: int
) -> None:
    """Launch the kernel of `sparsifiers.gpu.records.encode_sum`."""
    launch(
        eden_encode_sum_kernel, table.programs, out,
        table.send(rows.device, [*keys, own]), *_runs(table), rows, rows.stride(0), len(rows), scale, out,
        FROM=bits, FROM_LEVELS=_LEVELS[bits], **_levels(second), SIZES=table.sizes, TILE=TILE, maxnreg=REGISTERS,
    )  # fmt: skip


def _levels(bits: int) -> dict[str, object]:
    """Return the constants of a quantiser that writes."""
    return {"BITS": bits, "LEVELS": _LEVELS[bits], "ENDS": _ENDS[bits], "SPIKE": _SPIKE[bits]}


def _runs(table: BlockTable) -> tuple[int, int]:
    """Return how many runs there are, and in how many steps a program finds its own."""
    return len(table.runs), (len(table.runs) - 1).bit_length()


def _addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    """Return where tensors begin; 0 for none."""
    return [0 if one is None else one.data_ptr() for one in tensors]
