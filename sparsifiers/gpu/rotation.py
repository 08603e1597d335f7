# SPDX-License-Identifier: Apache-2.0
"""Quantise and read rotated blocks on a device: the quantiser `eden`, whose records are the same on every machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsifiers.gpu.choice import runs_triton
from sparsifiers.quantising.draws import Draws

BITS = (1, 2, 3, 4)  # the numbers of quantisers that have kernels, which are eden's bits
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def encode(values: Tensor, size: int, draws: Draws, out: Tensor, squares: Tensor | None, number: int) -> bool:
    """Write all blocks of `values`, as `Quantiser.encode` does, in one launch; return whether there is a kernel.

    number: of the quantiser, see `sparsifiers.kernel_quantising`. Reads 4 or 2 bytes an element. Nothing waits.
    """
    if not (number in BITS and runs_triton(out) and _is_plain(values) and out.is_contiguous()):
        return False
    from sparsifiers.gpu.kernels import rotation as kernel

    kernel.encode(values, size, draws, out, squares, number)
    return True


def decode_sum(
    messages: Sequence[Tensor], draws: Sequence[Draws], size: int, scale: float, out: Tensor, number: int
) -> bool:
    """Write the sum of all messages, as `Quantiser.decode_sum` does, in one launch; return whether there is a kernel.

    A copy of 24 bytes a sender goes to the device before it. Writes 4 or 2 bytes an element. Nothing waits.
    """
    if not (number in BITS and runs_triton(out) and _is_plain(out) and _are_contiguous(messages)):
        return False
    from sparsifiers.gpu.kernels import rotation as kernel

    kernel.decode_sum(messages, draws, size, scale, out, number)
    return True


def encode_sum(
    messages: Sequence[Tensor], draws: Sequence[Draws], size: int, scale: float, own: Draws, out: Tensor,
    first: int, second: tuple[int, int],
) -> bool:  # fmt: skip
    """Write the sum of all messages in bits again, as `Quantiser.encode_sum` does; return whether there is a kernel.

    first: number of the quantiser of the messages. second: that of `out`, and the bytes of its records. One launch and
    the copy of :func:`decode_sum`: the sum stays in registers. Nothing waits.
    """
    if not (first in BITS and second[0] in BITS and runs_triton(out) and _are_contiguous([*messages, out])):
        return False
    from sparsifiers.gpu.kernels import rotation as kernel

    kernel.encode_sum(messages, draws, size, scale, own, out, first, second[0], out.numel() // second[1])
    return True


def _is_plain(values: Tensor) -> bool:
    """Return whether kernels can read or write `values`."""
    return values.dtype in DTYPES and values.is_contiguous()


def _are_contiguous(messages: Sequence[Tensor]) -> bool:
    return all(message.is_contiguous() for message in messages)
