# SPDX-License-Identifier: Apache-2.0
"""Compiled loops of quantizers: bytes and values have the bits that torch's operations in this room give.

As in `sparsifiers.native`, a function returns False, with nothing done, if torch must do the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsifiers import native

INT4, INT8 = 5, 6  # numbers of quantizers in kernel_quantise.h; eden's are its bits
NONE = 0  # the number of one without loops
Words = tuple[int, int]  # key and first block: `sparsifiers.quantising.base.Draws`
Record = tuple[int, int]  # number of a quantizer, and bytes of a block


def quantize(
    values: Tensor, size: int, draws: Words, out: Tensor, squares: Tensor | None, record: Record,
    less: Tensor | None = None,
) -> bool:  # fmt: skip
    """Write all blocks of ``values - less``, as `Quantizer.encode` does, and squares to 2**-20; False: torch must."""
    n, kind, (number, bytes_each) = values.numel(), native.KINDS.get(values.dtype), record
    fits = number and n and out.numel() == -(-n // size) * bytes_each
    fits = fits and (less is None or (kind == 0 and less.shape == values.shape))
    return bool(fits) and native.QUANTIZE(values, less, n, kind, number, size, *draws, out, squares) is not None


def add_quantized(
    messages: Sequence[Tensor], draws: Sequence[Words], size: int, scale: float, out: Tensor, record: Record
) -> bool:
    """Write ``scale`` times the sum of all messages' values, as `Quantizer.decode_sum` does; False: torch must."""
    n, (number, bytes_each) = out.numel(), record
    if not number or not n or not _are_records(messages, draws, -(-n // size) * bytes_each):
        return False
    given = _senders(messages, draws)
    sizes = *map(native.address, given), len(messages), number, size, scale
    return native.ADD_QUANTIZED(*sizes, out, n, native.KINDS.get(out.dtype)) is not None


def quantize_sum(
    messages: Sequence[Tensor], draws: Sequence[Words], size: int, scale: float, own: Words, out: Tensor,
    first: Record, second: Record,
) -> bool:  # fmt: skip
    """Write the sum of `add_quantized` by another quantizer, as `Quantizer.encode_sum` does; False: torch must."""
    blocks, rest = divmod(out.numel(), second[1])
    if not (first[0] and second[0] and blocks) or rest or not _are_records(messages, draws, blocks * first[1]):
        return False
    given = _senders(messages, draws)
    sizes = *map(native.address, given), len(messages), first[0], size, scale
    return native.QUANTIZE_SUM(*sizes, second[0], *own, out, blocks) is not None


def _are_records(messages: Sequence[Tensor], draws: Sequence[Words], size: int) -> bool:
    """Return whether there are messages, of ``size`` bytes each, that the loops can read, with draws for each."""
    fits = [message.numel() == size and native.plain(message, dtype=torch.uint8) for message in messages]
    return 0 < len(messages) == len(draws) and all(fits)


def _senders(messages: Sequence[Tensor], draws: Sequence[Words]) -> tuple[NDArray[Any], ...]:
    """Return addresses, keys and first blocks of the messages of all senders, 64 bits each."""
    addresses = np.array([message.data_ptr() for message in messages], dtype=np.uint64)
    keys, firsts = zip(*draws, strict=True)
    return addresses, np.array(keys, dtype=np.uint64), np.array(firsts, dtype=np.int64)
