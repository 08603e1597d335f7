"""Say which rows the tensors of a vector have, so that one launch takes them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsifiers.rows import Matrix, deal, matrices

PANEL = 8  # rows that a program takes at once: of columns that lie side by side, 32 bytes


@dataclass(frozen=True)
class RowTable:
    """Say which rows the tensors of a vector have, cut into panels: a constant of the plan.

    Only the shares change from step to step.
    """

    tensors: tuple[Matrix, ...]
    places: Tensor  # int32[tensors, 5]: offset, rows, length, from row to row, from place to place; on the device
    panels: Tensor  # int32[panels, 2]: a tensor, and its first row; on the device
    shares: Tensor  # int32[tensors, 3]: of each row, how many rows get one more, the first of these; on the device

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]], device: torch.device) -> RowTable:
        """Return the table of a vector that concatenates tensors of `shapes`. Waits for a device."""
        tensors = matrices(shapes)
        steps = [(1, one.rows) if one.columns else (one.length, 1) for one in tensors]
        places = [(one.offset, one.rows, one.length, *step) for one, step in zip(tensors, steps, strict=True)]
        panels = [(i, row) for i, one in enumerate(tensors) for row in range(0, one.rows, PANEL)]
        return cls(
            tuple(tensors),
            torch.tensor(places, dtype=torch.int32, device=device).view(-1, 5),
            torch.tensor(panels, dtype=torch.int32, device=device).view(-1, 2),
            torch.zeros(len(tensors), 3, dtype=torch.int32, device=device),
        )

    def send_shares(self, k: int, turn: int, staging: Tensor) -> None:
        """Queue a copy of what the tensors are dealt of k in one turn (see `sparsifiers.rows.deal`) to the device.

        staging: int32[tensors, 3] in pinned memory, which must stay as it is until the copy has been made.
        """
        shares = [(*divmod(share.count, share.matrix.rows), share.start) for share in deal(self.tensors, k, turn)]
        staging.copy_(torch.tensor(shares, dtype=torch.int32).view(-1, 3))
        self.shares.copy_(staging, non_blocking=True)
