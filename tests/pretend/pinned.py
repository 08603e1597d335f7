# SPDX-License-Identifier: Apache-2.0
"""Memory of the host that a device copies to and from while the host goes on: what the host may not know yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pretend.clocks import Clock, Race, covers


class Copy(NamedTuple):
    """A copy that the host has not waited for."""

    tensor: Tensor  # the host's
    content: Tensor  # what arrives in it, or what it must still have when the copy is made
    arrives: bool  # from the device; else it goes there
    clock: Clock  # when it has ended
    line: str  # of the library, that asked for it


class PinnedMemory:
    """Hold what is pinned, and the copies under way. What comes from the device is there once the host has waited.

    ``report`` is told of memory that the host writes to before it has been read.
    """

    def __init__(self, report: Callable[[Race], None]) -> None:
        self._report = report
        self._pinned: dict[int, Tensor] = {}  # by address; kept, so that an address means one of them
        self._copies: list[Copy] = []

    def allocate(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return zeros, 1-D."""
        tensor = torch.zeros(size, dtype=dtype)
        self.adopt(tensor)
        return tensor

    def adopt(self, tensor: Tensor) -> None:
        """Take memory that torch has pinned."""
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def leaving(self, tensor: Tensor, clock: Clock, line: str) -> None:
        """Note that the device will read ``tensor``."""
        self._copies.append(Copy(tensor, tensor.clone(), False, clock, line))

    def arriving(self, tensor: Tensor, before: Tensor, clock: Clock, line: str) -> None:
        """Note that what ``tensor`` has now is there later; till then it has what it had ``before``."""
        self._copies.append(Copy(tensor, tensor.clone(), True, clock, line))
        tensor.copy_(before)

    def waited(self, host: Clock) -> None:
        """End the copies that have ended for sure. ``host``: what the host knows."""
        ended = [copy for copy in self._copies if covers(host, copy.clock)]
        self._copies = [copy for copy in self._copies if not covers(host, copy.clock)]
        for copy in ended:
            if copy.arrives:
                copy.tensor.copy_(copy.content)
            elif not torch.equal(_bytes(copy.tensor), _bytes(copy.content)):
                self._report(Race(f"the device reads pinned memory: {copy.line}", "the host writes to it meanwhile"))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
