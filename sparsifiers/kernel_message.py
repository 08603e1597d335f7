# SPDX-License-Identifier: Apache-2.0
"""Call the compiled loops on the entries of messages: indices, and the values there.

Where `subtract`, `write_and_subtract` and `mask` return False, with nothing done, torch must do it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparsifiers import kernel
from sparsifiers.kernel import Keys, address, loaded, plain

SCATTERED = 1 << 13  # indices from which `subtract` is faster than torch (measured)


def subtract(work: Tensor, indices: Tensor, sent: Tensor) -> bool:
    """Subtract: work[indices] -= sent, an index that occurs again included; False: torch must do it.

    work: fp32 [n]; indices: int32[m]; sent: fp32 [m].

    IndexError, with nothing done, for an index outside [0, len(work)).
    """
    count = indices.numel()
    if count < SCATTERED or not _fits(indices, sent, work):
        return False
    if loaded().kernel_commit(work.data_ptr(), work.numel(), indices.data_ptr(), sent.data_ptr(), count):
        raise IndexError(f"an index to commit is outside [0, {work.numel()})")
    return True


def write_and_subtract(work: Tensor, indices: Tensor, values: Tensor, momentum: Tensor | None = None) -> bool:
    """Write values = work[indices] and subtract them: work[indices] -= values, and momentum[indices] *= values == 0.

    work and momentum: fp32 [n]; indices: int32[m], each of them once; values: fp32 [m]. Returns False, with nothing
    done, if torch must do it.

    IndexError, with nothing done, for an index outside [0, len(work)).
    """
    if not _fits(indices, values, work, *(() if momentum is None else (momentum,))):
        return False
    if loaded().kernel_take(
        work.data_ptr(), 0 if momentum is None else momentum.data_ptr(), work.numel(), indices.data_ptr(),
        values.data_ptr(), indices.numel(),
    ):  # fmt: skip
        raise IndexError(f"an index to take is outside [0, {work.numel()})")
    return True


def mask(momentum: Tensor, indices: Tensor, sent: Tensor) -> bool:
    """Write momentum[indices] *= sent == 0, an index that occurs again included; False: torch must do it.

    momentum: fp32 [n]; indices: int32[m]; sent: fp32 [m].

    IndexError, with nothing done, for an index outside [0, len(momentum)).
    """
    if not _fits(indices, sent, momentum):
        return False
    count = indices.numel()
    if loaded().kernel_mask(momentum.data_ptr(), momentum.numel(), indices.data_ptr(), sent.data_ptr(), count):
        raise IndexError(f"an index to clear is outside [0, {momentum.numel()})")
    return True


def ascends(indices: Keys, length: int) -> bool | None:
    """Return whether indices, int32[m], are ascending, unique and within [0, length); None: numpy must."""
    if not kernel.reads(indices):
        return None
    return bool(loaded().kernel_fit(address(indices), len(indices), 0, length))


def checksum(data: Tensor) -> int:
    """Return the sum modulo 2**64, over the words w_i of 64 bits of `data`, uint8 on the host, of (2i+1) w_i."""
    if plain(data, dtype=torch.uint8):
        return int(loaded().kernel_checksum(data.data_ptr(), data.numel()))
    padded = np.zeros(-(-data.numel() // 8) * 8, dtype=np.uint8)
    padded[: data.numel()] = data.numpy()
    words = padded.view("<u8")
    with np.errstate(over="ignore"):
        return int((words * (2 * np.arange(len(words), dtype=np.uint64) + np.uint64(1))).sum(dtype=np.uint64))


def _fits(indices: Tensor, values: Tensor, vector: Tensor, *others: Tensor) -> bool:
    """Return whether the loops can read indices, as many values, a vector that they are of, and others as long."""
    if not indices.dim() == vector.dim() == 1 or values.shape != indices.shape:
        return False
    alike = all([other.shape == vector.shape for other in others])
    return alike and plain(indices, dtype=torch.int32) and plain(values, vector, *others)
