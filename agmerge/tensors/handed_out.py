# SPDX-License-Identifier: Apache-2.0
"""Flat memory of updates, which a script gets as ``p.grad``: who still refers to it when the next step writes there.

As in plain torch, a gradient that a script keeps by reference after ``step()`` and ``zero_grad()`` stays as it is: the
next updates are written elsewhere. Use counts show that, at some tens of nanoseconds a tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence

import torch

from agmerge.tensors.flat_memory import view
from agmerge.tensors.layout import Slot

_count_of_storage = getattr(torch._C, "_storage_Use_Count", None)


def references(tensors: Iterable[torch.Tensor]) -> int:
    """Return the largest reference count among ``tensors``, those of the values of a dictionary."""
    return max(map(sys.getrefcount, tensors), default=0)  # in C: for each step and tensor


class HandedOut:
    """Flat memory of the updates of ``slots``, all in ``flat``, and whether others than this object refer to it.

    ``views``: by slot, what a parameter's ``grad`` becomes.
    """

    def __init__(self, flat: torch.Tensor, slots: Sequence[Slot]) -> None:
        # `.data`: each with a version of its own, which shows whether a script has written to it.
        self.views = {slot.index: view(flat, slot).data for slot in slots}
        self._flat = flat
        self._own_aliases = self._aliases()  # of this library, as long as nothing was handed out

    def is_kept(self, parameters: Mapping[int, torch.Tensor]) -> bool:
        """Return whether the script still refers to an update, or to a view or an alias of it.

        ``parameters``: by slot, the script's own. What is still a parameter's ``grad`` does not count, for backward
        passes write to that anyway.
        """
        if self._aliases() > self._own_aliases:
            return True
        if references(self.views.values()) <= UNSHARED:
            return False
        others = {i: one for i, one in self.views.items() if i in parameters and parameters[i].grad is not one}
        return references(others.values()) > UNSHARED + 1  # `others` refers to each, too

    def _aliases(self) -> int:
        """Return how many tensors there are in this memory; 0 where torch does not say so."""
        if _count_of_storage is None:
            return 0
        return int(_count_of_storage(self._flat.untyped_storage()._cdata))


UNSHARED = references({0: torch.empty(0)}.values())  # count of a tensor that only a dictionary refers to
