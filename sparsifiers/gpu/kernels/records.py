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

from sparsifiers.gpu.kernels.blocks import bfloat16_bits, mixed, packed, read_blocks, write_blocks
from sparsifiers.gpu.kernels.launching import launch
from sparsifiers.gpu.tables import FIELDS, TILE, BlockTable
from sparsifiers.quantising.draws import LEVELS, SPIKE, WORDS, thresholds

REGISTERS = 128  # of a thread, at most: so two programs have room in a processor
DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_WORDS, _FIELDS = tl.constexpr(WORDS), tl.constexpr(len(FIELDS))
# By bits: levels, and the ends of all but the last; as constants, of which unused ones are 0.
_OWN_LEVELS = {bits: (*some, *[0] * (8 - len(some))) for bits, some in LEVELS.items()}
_OWN_ENDS = {bits: (*thresholds(bits), *[0.0] * (9 - len(some))) for bits, some in LEVELS.items()}
# Behind each eight those of one bit less, for mixed records.
_LEVELS, _ENDS = ({bits: own[bits] + own[max(bits - 1, 1)] for bits in LEVELS} for own in (_OWN_LEVELS, _OWN_ENDS))
_SPIKE = {bits: (SPIKE[bits], SPIKE[max(bits - 1, 1)]) for bits in LEVELS}


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
def groups_of(
    row: tl.tensor, AGAIN: tl.constexpr, DOUBLINGS: tl.constexpr, TILE: tl.constexpr
) -> tuple[tl.tensor, ...]:  # fmt: skip
    """Return of a program: its number in the run, and of each group block, place in it, word, and whether it is there.

    AGAIN: made anew from memory, since the compiler would keep what it has across a loop, and registers are few.
    Blocks are counted from the first of the run, int64[TILE // 64]; words from the first of the tensor.
    """
    task = tl.program_id(0).to(tl.int64) - tl.load(row, volatile=AGAIN)
    group = tl.arange(0, TILE // 64)
    block = task * ((TILE // 64) >> DOUBLINGS) + (group >> DOUBLINGS)
    inside = group & ((1 << DOUBLINGS) - 1)
    word = (tl.load(row + 2, volatile=AGAIN) + block) * _WORDS + inside
    return task, block, inside, word, block < tl.load(row + 3, volatile=AGAIN)


@triton.jit
def key_of(keys: tl.tensor, row: tl.tensor) -> tl.tensor:
    """Return the key of this program's tensor under a key of a message: uint64."""
    return mixed((tl.load(keys) ^ tl.load(row + 1)).to(tl.uint64))


@triton.jit
def encode_tile(
    table: tl.tensor, runs: tl.tensor, row: tl.tensor, out: tl.tensor, squares: tl.tensor,
    FROM: tl.constexpr, SQUARES: tl.constexpr,
    BITS: tl.constexpr, LEVELS: tl.constexpr, ENDS: tl.constexpr, SPIKE: tl.constexpr, DOUBLINGS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Write the records of one tile of a tensor; without one, of zeros."""
    task, block, inside, word, live = groups_of(row, False, DOUBLINGS, TILE)
    address = tl.load(row + 6)
    place = task * TILE + tl.arange(0, TILE)
    length = tl.where(address != 0, tl.load(row + 5), 0)
    values = tl.load(address.to(tl.pointer_type(FROM)) + place, mask=place < length, other=0.0).to(tl.float32)
    gaps = ((values == 0.0) & (place < length)).to(tl.int32)
    found = write_blocks(
        values, packed(gaps, TILE), key_of(table + _FIELDS * runs, row), out + tl.load(row + 7), block, inside, word,
        live, BITS, LEVELS, ENDS, SPIKE, DOUBLINGS, TILE,
    )  # fmt: skip
    if SQUARES:
        tl.atomic_add(squares, found, sem="relaxed")


@triton.jit
def sum_of(
    table: tl.tensor, runs: tl.tensor, row: tl.tensor, rows: tl.tensor, stride: tl.tensor, senders: tl.tensor,
    scale: tl.tensor,
    AGAIN: tl.constexpr, BITS: tl.constexpr, LEVELS: tl.constexpr, DOUBLINGS: tl.constexpr, TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Return `scale` times the sum of the values of a tile of all senders, in their order: float32[TILE].

    And where one of them is held, int32[TILE // 64, 8], see `read_blocks`. AGAIN: of `groups_of`, for each sender.
    """
    data = rows + tl.load(row + 6)
    keys = table + _FIELDS * runs
    # Of -0.0, which leaves what is added; `tl.full` would make 0.0 of it.
    total = tl.full([TILE], -0x80000000, tl.int32).to(tl.float32, bitcast=True)
    held = tl.zeros([TILE // 64, 8], tl.int32)
    for sender in range(senders):
        _, block, inside, word, live = groups_of(row, AGAIN, DOUBLINGS, TILE)
        read, some = read_blocks(
            data, key_of(keys + sender, row), block, inside, word, live, BITS, LEVELS, DOUBLINGS, TILE
        )  # fmt: skip
        total += read
        held |= some
        data += stride
    return total * scale, held


@triton.jit
def decode_tile(
    table: tl.tensor, runs: tl.tensor, row: tl.tensor, rows: tl.tensor, stride: tl.tensor, senders: tl.tensor,
    scale: tl.tensor,
    TO: tl.constexpr, BITS: tl.constexpr, LEVELS: tl.constexpr, DOUBLINGS: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Write the sum of one tile of all senders to its tensor. `TO`: its dtype, but for bfloat16 int16."""
    total, _ = sum_of(
        table, runs, row, rows, stride, senders, scale, BITS == 1, BITS, LEVELS, DOUBLINGS, TILE
    )  # fmt: skip
    place = (tl.program_id(0).to(tl.int64) - tl.load(row)) * TILE + tl.arange(0, TILE)
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
    total, held = sum_of(
        table, runs, row, rows, stride, senders, scale, True, FROM, FROM_LEVELS, DOUBLINGS, TILE
    )  # fmt: skip
    _, block, inside, word, live = groups_of(row, True, DOUBLINGS, TILE)
    key = key_of(table + _FIELDS * runs + senders, row)
    write_blocks(
        total, held ^ 255, key, out + tl.load(row + 7), block, inside, word, live, BITS, LEVELS, ENDS, SPIKE, DOUBLINGS,
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


def launch_encode(
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


def launch_decode_sum(
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


def launch_encode_sum(
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
