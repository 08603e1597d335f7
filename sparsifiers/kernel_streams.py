"""Call the compiled loops of kernel_streams.c, whose stores go past the caches.

For tensors that they cannot read or that are small, and where torch uses several threads, torch must do it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsifiers.kernel import STREAMED, loaded, plain


def zero(total: Tensor) -> None:
    """Write 0 to all of total, in place, for any tensor."""
    if _streams(total) and plain(total):
        loaded().kernel_zero(total.data_ptr(), total.numel())
    else:
        total.zero_()


def add_and_move(work: Tensor, home: Tensor, residual: Tensor, gradient: Tensor) -> bool | None:
    """Write work = residual + gradient and home = gradient in one pass, and return whether all of work is finite.

    The bits are those of torch.add and of a copy. None, with nothing done: torch must do it. All are fp32, of one shape,
    and share no storage.
    """
    if not _streams(work) or not all(map(plain, (work, home, residual, gradient))):
        return None
    if not work.shape == home.shape == residual.shape == gradient.shape:
        return None  # whoever adds up by itself says what is wrong
    status = loaded().kernel_add_and_move(
        work.data_ptr(), home.data_ptr(), residual.data_ptr(), gradient.data_ptr(), work.numel()
    )
    return None if status < 0 else status == 0


def _streams(tensor: Tensor) -> bool:
    """Tell whether a tensor is so large that stores past the caches pay, and several threads are not faster."""
    return tensor.numel() >= STREAMED and torch.get_num_threads() == 1
