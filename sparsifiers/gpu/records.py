# SPDX-License-Identifier: Apache-2.0
"""Quantise and read blocks of many tensors on a device: `eden`, with the same records on every machine.

All of them return False, with nothing done, where torch must do it. One launch each, and a copy of 64 bytes a run and
8 a sender to the device before it; where tensors have several dtypes, so much for each. Nothing waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from sparsifiers.gpu.choice import runs_triton
from sparsifiers.gpu.tables import BlockRun, BlockTable
from sparsifiers.quantising.draws import Draws, unmixed

BITS = (1, 2, 3, 4)  # the numbers of quantisers that have kernels, which are eden's bits
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Given = TypeVar("Given", Tensor, "Tensor | None")  # None: zeros


def encode_all(
    table: BlockTable, values: Sequence[Tensor | None], key: int, out: Tensor, squares: Tensor | None, number: int
) -> bool:
    """Write all blocks of `values`, as `Quantiser.encode_all` does.

    number: of the quantiser, see `sparsifiers.native`. Reads 4 or 2 bytes an element.
    """
    if not (number in BITS and runs_triton(out) and _are_plain(values) and out.is_contiguous()):
        return False
    from sparsifiers.gpu.kernels.records import launch_encode

    for part, given in _by_dtype(table, values):
        launch_encode(part, given, key, out, squares, number)
    return True


def decode_all(
    table: BlockTable, rows: Tensor, keys: Sequence[int], scale: float, outs: Sequence[Tensor], number: int
) -> bool:
    """Write the sums of all senders, as `Quantiser.decode_all` does. Writes 4 or 2 bytes an element."""
    if not (number in BITS and runs_triton(rows) and _are_plain(outs) and rows.stride(1) == 1):
        return False
    from sparsifiers.gpu.kernels.records import launch_decode_sum

    for part, given in _by_dtype(table, outs):
        launch_decode_sum(part, rows, keys, scale, given, number)
    return True


def encode_sum_all(
    table: BlockTable, rows: Tensor, keys: Sequence[int], scale: float, own: int, out: Tensor, first: int, second: int
) -> bool:
    """Write the sums of all senders in bits again, as `Quantiser.encode_sum_all` does: they stay in registers.

    first, second: numbers of the quantisers of `rows` and of `out`.
    """
    if not (first in BITS and second in BITS and runs_triton(out) and rows.stride(1) == 1 and out.is_contiguous()):
        return False
    from sparsifiers.gpu.kernels.records import launch_encode_sum

    launch_encode_sum(table, rows, keys, scale, own, out, first, second)
    return True


# -- of one tensor ----------------------------------------------------------------------------------------------------


def encode(values: Tensor, size: int, draws: Draws, out: Tensor, squares: Tensor | None, number: int) -> bool:
    """Write all blocks of one tensor, as `Quantiser.encode` does."""
    if not (number in BITS and runs_triton(out)):
        return False
    return encode_all(_table(values.numel(), size, draws), [values], unmixed(draws.key), out, squares, number)


def decode_sum(
    messages: Sequence[Tensor], draws: Sequence[Draws], size: int, scale: float, out: Tensor, number: int
) -> bool:
    """Write the sum of one tensor of all messages, as `Quantiser.decode_sum` does; several are copied side by side."""
    if not (number in BITS and runs_triton(out) and _begin_alike(draws)):
        return False
    keys = [unmixed(one.key) for one in draws]
    return decode_all(_table(out.numel(), size, draws[0]), _rows(messages), keys, scale, [out], number)


def encode_sum(
    messages: Sequence[Tensor], draws: Sequence[Draws], size: int, scale: float, own: Draws, out: Tensor,
    first: int, second: tuple[int, int],
) -> bool:  # fmt: skip
    """Write the sum of one tensor in bits again, as `Quantiser.encode_sum` does; several are copied side by side.

    first: number of the quantiser of the messages. second: that of `out`, and the bytes of its records.
    """
    if not (first in BITS and runs_triton(out) and _begin_alike([*draws, own])):
        return False
    table = _table(out.numel() // second[1] * size, size, own)
    keys = [unmixed(one.key) for one in draws]
    return encode_sum_all(table, _rows(messages), keys, scale, unmixed(own.key), out, first, second[0])


def _table(length: int, size: int, draws: Draws) -> BlockTable:
    """Return the table of one tensor, or of a part of it: under number 0, so that keys are `unmixed`."""
    return BlockTable([BlockRun(0, size, draws.first, -(-length // size), length)])


def _begin_alike(draws: Sequence[Draws]) -> bool:
    return all(one.first == draws[0].first for one in draws)


def _rows(messages: Sequence[Tensor]) -> Tensor:
    """Return messages of one length as a matrix."""
    return messages[0].unsqueeze(0) if len(messages) == 1 else torch.stack(list(messages))


def _are_plain(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether kernels can read or write all of `tensors`."""
    return all(one is None or (one.dtype in DTYPES and one.is_contiguous()) for one in tensors)


def _by_dtype(table: BlockTable, tensors: Sequence[Given]) -> Iterator[tuple[BlockTable, list[Given]]]:
    """Yield the runs of each dtype with their tensors; what has none goes with the first."""
    dtypes = list(dict.fromkeys(one.dtype for one in tensors if one is not None))
    if len(dtypes) < 2:
        yield table, list(tensors)
        return
    for dtype in dtypes:
        chosen = [
            number for number, one in enumerate(tensors) if (dtypes[0] if one is None else one.dtype) == dtype
        ]  # fmt: skip
        yield table.part(chosen), [tensors[number] for number in chosen]
