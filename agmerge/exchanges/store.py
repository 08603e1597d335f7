# SPDX-License-Identifier: Apache-2.0
"""Contract of the owner of residuals and updates: an exchange tells it what was sent of a segment."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from agmerge.exchanges.low_rank.bases import Bases
from agmerge.tensors.arena import Unwritten, Write
from agmerge.tensors.layout import Segment, Slot


class Store(ABC):
    """Owner of the flat buffers that an exchange reads and writes: it alone changes residuals.

    The conservation of gradients is its matter: an exchange calls :meth:`subtract_sent` with this rank's contribution
    to the update, and whatever is left in the segment's work is the next residual.
    """

    has_residual = False  # some work keeps what was not sent; else nothing need be subtracted from dense segments
    bases: Bases | None = None  # of low-rank tensors; None: there are none

    @abstractmethod
    def subtract_sent(
        self, segment: Segment, indices: torch.Tensor | None, sent: torch.Tensor | Unwritten | None
    ) -> None:
        """Subtract this rank's contribution from the segment's work: ``work[indices] -= sent``.

        ``indices``: int32 or int64, (n,); None: all elements. ``sent``: (n,); None: all of the work, as it is.
        """

    def write_and_subtract(self, segment: Segment, write: Write) -> bool:
        """Write selected values to their message, unrounded, and subtract them from the work, in one pass.

        Returns False, with nothing done, where that takes two passes.
        """
        return False

    def add_unsent(self, segment: Segment, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Add to the work the quantisation error of sums that this rank has encoded for all ranks.

        ``indices``: int32 or int64, (n,), ascending; ``values``: (n,).
        """
        raise NotImplementedError(f"{segment.key}: a codec rounds sums, and {type(self).__name__} has no add_unsent()")

    def takes_selections(
        self, segment: Segment, selections: list[tuple[torch.Tensor, torch.Tensor]], factor: float
    ) -> bool:
        """Return whether the (indices, values) of each rank are enough, with their factor: then no update is written.

        Asked where ranks' selections are at hand, one by one.
        """
        return False

    def observe(self, values: torch.Tensor, count: int | torch.Tensor) -> None:  # noqa: B027  most need not know
        """Look at values that are sent, before they are rounded. The first ``count`` are in use. May copy them."""

    def count_zeros(self, slot: Slot, values: torch.Tensor | None) -> None:  # noqa: B027  most need not know
        """Count zeros in the blocks of a tensor that is sent, or could be, in few bits: 1-D; None: all are zero."""

    def update_of(self, slot: Slot) -> torch.Tensor:
        """Return where the update of a prepared tensor is written: in its shape and dtype, contiguous."""
        raise NotImplementedError(f"{slot.name}: it was prepared, and {type(self).__name__} has no update_of()")
