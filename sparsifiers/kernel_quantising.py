# SPDX-License-Identifier: Apache-2.0
"""Call the compiled loops of quantisers: records of values, sums of records, and records of these.

All of them return False, with nothing done, where torch must do it. Bytes and values have the bits that the operations
of `sparsifiers.quantising` give; a sum of squares is right to 2**-20 of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, float64, uint8

from sparsifiers.kernel import KINDS, loaded, plain
from sparsifiers.quantising.draws import Draws

# Quantisers that have loops, by their number in kernel_quantise.h; 0: none.
NONE = 0
INT4, INT8 = 5, 6  # eden's are its bits


def encode(
    values: Tensor, size: int, draws: Draws, out: Tensor, squares: Tensor | None, number: int, record: int
) -> bool:
    """Write all blocks of ``values`` by the quantiser ``number``, as `Quantiser.encode` does.

    record: bytes of a block.
    """
    if not (number and values.dtype in KINDS and values.numel() and plain(values, dtype=values.dtype)):
        return False
    if not (_holds(out, -(-values.numel() // size) * record) and (squares is None or plain(squares, dtype=float64))):
        return False
    loaded().kernel_quantise(
        values.data_ptr(), values.numel(), KINDS[values.dtype], number, size, _signed(draws.key), draws.first,
        out.data_ptr(), 0 if squares is None else squares.data_ptr(),
    )  # fmt: skip
    return True


def decode_sum(
    messages: Sequence[Tensor], draws: Sequence[Draws], size: int, scale: float, out: Tensor, number: int, record: int
) -> bool:
    """Write ``scale`` times the sum of all messages' values, as `Quantiser.decode_sum` does; see `encode`."""
    if not (number and out.dtype in KINDS and out.numel() and plain(out, dtype=out.dtype)):
        return False
    if not _fit(messages, draws, -(-out.numel() // size) * record):
        return False
    pointers, keys, firsts = _senders(messages, draws)
    loaded().kernel_add_quantised(
        pointers.ctypes.data, keys.ctypes.data, firsts.ctypes.data, len(pointers), number, size, scale,
        out.data_ptr(), out.numel(), KINDS[out.dtype],
    )  # fmt: skip
    return True


def encode_sum(
    messages: Sequence[Tensor], draws: Sequence[Draws], size: int, scale: float, own: Draws, out: Tensor,
    first: tuple[int, int], second: tuple[int, int],
) -> bool:  # fmt: skip
    """Write the sum of `decode_sum` by another quantiser, as `Quantiser.encode_sum` does.

    first, second: number and bytes of a block of the quantiser of the messages, and of that of ``out``.
    """
    blocks = out.numel() // second[1]
    if not (first[0] and second[0] and blocks):
        return False
    if not (_holds(out, blocks * second[1]) and _fit(messages, draws, blocks * first[1])):
        return False
    pointers, keys, firsts = _senders(messages, draws)
    loaded().kernel_quantise_sum(
        pointers.ctypes.data, keys.ctypes.data, firsts.ctypes.data, len(pointers), first[0], size, scale,
        second[0], _signed(own.key), own.first, out.data_ptr(), blocks,
    )  # fmt: skip
    return True


def _fit(messages: Sequence[Tensor], draws: Sequence[Draws], size: int) -> bool:
    """Return whether there are messages, of ``size`` bytes each, that the loops can read, with draws for each."""
    return 0 < len(messages) == len(draws) and all(_holds(message, size) for message in messages)


def _holds(data: Tensor, size: int) -> bool:
    """Return whether the loops can read ``data``, and it has ``size`` bytes."""
    return data.numel() == size and plain(data, dtype=uint8)


def _senders(messages: Sequence[Tensor], draws: Sequence[Draws]) -> tuple[NDArray[Any], ...]:
    """Return addresses, keys and first blocks of the messages of all senders, 64 bits each."""
    addresses = np.array([message.data_ptr() for message in messages], dtype=np.uint64)
    keys = np.array([each.key for each in draws], dtype=np.uint64)
    return addresses, keys, np.array([each.first for each in draws], dtype=np.int64)


def _signed(word: int) -> int:
    """Return a word of 64 bits as int64 has it."""
    return word - (word >> 63 << 64)
