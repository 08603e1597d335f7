# SPDX-License-Identifier: Apache-2.0
"""Memory of flat buffers: how it is taken and returned, views of tensors in it, and two halves that change places."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence

import numpy as np
import torch

from agmerge.tensors.layout import Slot

LINE = 64  # bytes


class Halves:
    """Two flat buffers of ``length`` elements: a step writes the front, and the back is as the last step has left it.

    ``double`` False: both are the same memory, of which nothing is kept. ``slots``: the tensors that lie in it.
    """

    def __init__(
        self, length: int, dtype: torch.dtype, device: torch.device, slots: Sequence[Slot], *, double: bool = True
    ) -> None:
        self.front = zeros(length, dtype, device)
        self.back = zeros(length, dtype, device) if double else self.front
        self.front_of = {slot.index: view(self.front, slot) for slot in slots}  # by slot: views of the tensors
        self.back_of = {slot.index: view(self.back, slot) for slot in slots} if double else self.front_of

    def swap(self) -> None:
        """Exchange front and back."""
        self.front, self.back = self.back, self.front
        self.front_of, self.back_of = self.back_of, self.front_of

    def revert(self, slot: Slot) -> None:
        """Make one tensor in front what it is at the back."""
        self.front_of[slot.index].copy_(self.back_of[slot.index])

    def keep(self, slot: Slot) -> None:
        """Make one tensor at the back what it is in front, before :meth:`swap`."""
        self.back_of[slot.index].copy_(self.front_of[slot.index])


def zeros(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a 1-D tensor of zeros on a cache line's boundary. On the host, pages take memory once written to.

    ``torch.zeros`` would write all of it at once, while all gradients of the first step are still in memory.
    """
    if device.type != "cpu":
        return torch.zeros(length, dtype=dtype, device=device)
    size = length * dtype.itemsize
    raw = torch.from_numpy(np.zeros(size + LINE, dtype=np.uint8))  # of calloc's
    start = -raw.data_ptr() % LINE
    return raw[start : start + size].view(dtype)


def trim() -> None:
    """Return freed memory to the system. Does nothing where the C library is not glibc.

    glibc keeps freed memory between two allocations that are in use: as much as all gradients, after a step that has
    copied them one by one to where their updates will be.
    """
    if sys.platform == "linux":
        give = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if give is not None:
            give(ctypes.c_size_t(0))


def view(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
    """Return the tensor of ``slot`` in ``flat``, in its shape and C order: a view."""
    return flat[slot.offset : slot.offset + slot.numel].view(slot.shape)
