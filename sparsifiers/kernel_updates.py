# SPDX-License-Identifier: Apache-2.0
"""Call the compiled loops of kernel_updates.c, about an update that is the sum of lists of indices and values.

Where one returns False, with nothing done, torch must do it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsifiers import kernel
from sparsifiers.kernel import address, loaded, plain

List = tuple[Tensor, Tensor]  # indices, int32[m], ascending, and values, fp32[m]


def write_sum(total: Tensor, lists: Sequence[List], scale: float) -> bool:
    """Write total = the sum of values * scale, list by list, 0 elsewhere, in one pass past the caches.

    total: fp32 [n]; indices lie in [0, n). False, with nothing done, for tensors of few elements, too.
    """
    if total.numel() < kernel.STREAMED or torch.get_num_threads() > 1 or not (plain(total) and _are_plain(lists)):
        return False
    given = _Pointers.to(lists)
    return not loaded().kernel_write_sum(
        total.data_ptr(), total.numel(), address(given.indices), address(given.values), address(given.counts),
        address(given.at), len(lists), scale,
    )  # fmt: skip


def takes_in(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether `take_in` can handle tensors of this dtype and device."""
    single = torch.get_num_threads() == 1  # several of torch's are faster
    return kernel.available() and dtype == torch.float32 and device.type == "cpu" and single


def take_in(
    base: Tensor, parameter: Tensor, first: int, lists: Sequence[List], scale: float,
    own: List,
) -> bool:  # fmt: skip
    """Subtract an update from base and parameter, 1-D fp32, in one pass: False, with nothing done, if torch must do it.

    lists: indices and values, of which the update is the sum of values * scale, list by list. own: indices and the
    values sent there: at these parameter = base - residual, where the residual is the old base - parameter, less these.
    Indices are int32, ascending, and count from first; values are fp32.
    """
    if not (plain(base, parameter) and _are_plain((*lists, own))) or base.numel() != parameter.numel():
        return False
    given = _Pointers.to(lists)
    return not loaded().kernel_take_in(
        base.data_ptr(), parameter.data_ptr(), base.numel(), first, address(given.indices), address(given.values),
        address(given.counts), address(given.at), len(lists), scale, own[0].data_ptr(), own[1].data_ptr(),
        own[0].numel(),
    )  # fmt: skip


class _Pointers(NamedTuple):
    """Pointers to lists, for C."""

    indices: NDArray[np.uintp]  # where those of each list begin
    values: NDArray[np.uintp]  # likewise
    counts: NDArray[np.int64]  # elements of each list
    at: NDArray[np.int64]  # scratch: how far each list was gone over

    @classmethod
    def to(cls, lists: Sequence[List]) -> _Pointers:
        """Return pointers to ``lists``, which have to outlive them."""
        indices, values = (np.array([pair[i].data_ptr() for pair in lists], dtype=np.uintp) for i in (0, 1))
        counts = np.array([pair[0].numel() for pair in lists], dtype=np.int64)
        return cls(indices, values, counts, np.empty(len(lists), dtype=np.int64))


def _are_plain(lists: Sequence[List]) -> bool:
    """Return whether the loops can read these lists."""
    return all([plain(i, dtype=torch.int32) and plain(v) and i.numel() == v.numel() for i, v in lists])
