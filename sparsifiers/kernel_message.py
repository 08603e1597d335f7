"""Call the compiled loops about what is sent of a vector: indices, and the values there.

What `take` and `mask` return False for, with nothing done, torch must do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsifiers import kernel
from sparsifiers.kernel import Keys, address, loaded, plain


def take(work: Tensor, indices: Tensor, values: Tensor, momentum: Tensor | None = None) -> bool:
    """Write values = work[indices], and take them off: work[indices] -= values, and momentum[indices] *= values == 0.

    work and momentum: fp32 [n]; indices: int32[m], each of them once; values: fp32 [m]. Returns False, with nothing
    done, if torch must do it.

    IndexError, with nothing done, for an index outside [0, len(work)).
    """
    if not (_fits(work, indices, values) and (momentum is None or _fits(momentum, indices, values))):
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
    if not _fits(momentum, indices, sent):
        return False
    count = indices.numel()
    if loaded().kernel_mask(momentum.data_ptr(), momentum.numel(), indices.data_ptr(), sent.data_ptr(), count):
        raise IndexError(f"an index to clear is outside [0, {momentum.numel()})")
    return True


def ascends(indices: Keys, length: int) -> bool | None:
    """Tell whether indices, int32[m], are ascending, unique and within [0, length); None: numpy must."""
    if not kernel.reads(indices):
        return None
    return bool(loaded().kernel_fit(address(indices), len(indices), 0, length))


def _fits(vector: Tensor, indices: Tensor, values: Tensor) -> bool:
    """Tell whether the loops can read a vector, indices in it, and as many values."""
    alike = vector.dim() == indices.dim() == values.dim() == 1 and values.numel() == indices.numel()
    return alike and plain(vector) and plain(indices, torch.int32) and plain(values)
