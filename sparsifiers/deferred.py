# SPDX-License-Identifier: Apache-2.0
"""Selections on a device that are made once their destination is known: perhaps a message."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from sparsifiers.base import Selection
from sparsifiers.gpu import IndexSection, Slots


class Select(Protocol):
    """Function that queues kernels which select and write: see `sparsifiers.gpu.select_largest`."""

    def __call__(
        self, slots: Slots, section: IndexSection | None = None, *, commit: bool, momentum: Tensor | None = None
    ) -> None:
        """Write indices and values to `slots`, indices to `section` too; `commit`: subtract values from the vector."""


class Deferred(Selection):
    """Selection that has still to be made, with all of its entries in use.

    `write` makes it at its destination. Reading its indices or values first makes it in tensors of its own. Once it
    has been written and subtracted from the vector, it cannot be read any more: RuntimeError.
    """

    def __init__(self, capacity: int, device: torch.device, select: Select) -> None:
        """Take the number of entries, the vector's device, and the function that selects."""
        self._capacity, self._device, self._select = capacity, device, select
        self._slots: Slots | None = None  # where it was made to be read
        self._is_taken = False  # the selection was subtracted from the vector

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def count(self) -> int:
        """Return how many entries are in use."""
        return self._capacity

    @property
    def indices(self) -> Tensor:
        """Return the places that are selected: int32[capacity], ascending."""
        return self._made().indices

    @property
    def values(self) -> Tensor:
        """Return the values there: fp32[capacity]."""
        return self._made().values

    def write(self, slots: Slots, section: IndexSection, *, commit: bool, momentum: Tensor | None) -> bool:
        """Make it in `slots` and `section`, which may be slices of a message; return True, for that can be done.

        commit: subtract the written values from the vector. momentum: like the vector, cleared where a value was
        subtracted.
        """
        self._select(slots, section, commit=commit, momentum=momentum)
        self._is_taken = commit
        return True

    def _made(self) -> Slots:
        if self._slots is None:
            if self._is_taken:
                raise RuntimeError(
                    "the selection is already written to a message and removed from its vector. Read it earlier."
                )
            self._slots = Slots.of(self._capacity, self._device)
            self._select(self._slots, commit=False)
        return self._slots
