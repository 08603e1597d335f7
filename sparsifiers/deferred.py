"""Make a selection on a device not before it is known where it is to be written: perhaps in a message."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from sparsifiers.base import Selection
from sparsifiers.gpu import IndexSection, Slots


class Select(Protocol):
    """Queue kernels that select, and write what they take: see `sparsifiers.gpu.select_largest`."""

    def __call__(
        self, slots: Slots, section: IndexSection | None = None, *, commit: bool, momentum: Tensor | None = None
    ) -> None:
        """Write indices and values to `slots`, and the index codec to `section`; `commit`: take them off the vector."""


class Deferred(Selection):
    """Be a selection that has still to be made, with all of its slots in use.

    `write` makes it where somebody wants it. Who looks at its indices or values first has it made in tensors of its
    own. Once it has been written and taken off the vector, there is nothing left to look at: RuntimeError.
    """

    def __init__(self, capacity: int, device: torch.device, select: Select) -> None:
        """Take how many are selected from a vector on `device`, and what does it."""
        self._capacity, self._device, self._select = capacity, device, select
        self._slots: Slots | None = None  # where it was made for who looked at it
        self._is_taken = False  # the vector has not got any more what was selected

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def count(self) -> int:
        """Return how many slots are in use."""
        return self._capacity

    @property
    def indices(self) -> Tensor:
        """Return the places that are selected: int32[capacity], ascending."""
        return self._made().indices

    @property
    def values(self) -> Tensor:
        """Return what stands there: fp32[capacity]."""
        return self._made().values

    def write(self, slots: Slots, section: IndexSection, *, commit: bool, momentum: Tensor | None) -> bool:
        """Make it in `slots` and `section`, which may be parts of a message; return True, for that can be done.

        commit: take what is written off the vector. momentum: like the vector, cleared where something was taken off.
        """
        self._select(slots, section, commit=commit, momentum=momentum)
        self._is_taken = commit
        return True

    def _made(self) -> Slots:
        if self._slots is None:
            if self._is_taken:
                raise RuntimeError("a selection was written to a message and taken off its vector: look at it before")
            self._slots = Slots.of(self._capacity, self._device)
            self._select(self._slots, commit=False)
        return self._slots
