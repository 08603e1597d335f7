# SPDX-License-Identifier: Apache-2.0
"""Rows of the tensors of a vector, as a table, so that one launch takes them all."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from sparsifiers.gpu.sending import send
from sparsifiers.rows import deal, matrices

PANEL = 8  # rows that a program takes at once: of columns that lie side by side, 32 bytes


class RowTable:
    """Rows of the tensors of a vector, cut into panels: a constant of the plan.

    Only the shares change from step to step. Tables are sent to the device when a kernel first needs them.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], device: torch.device) -> None:
        """Take the shapes of the tensors that the vector concatenates."""
        self.tensors = matrices(shapes)
        self._device = device

    @cached_property
    def places(self) -> Tensor:
        """Return offset, rows, length, from row to row and from place to place of each tensor: int32[tensors, 5]."""
        steps = [(1, one.rows) if one.columns else (one.length, 1) for one in self.tensors]
        rows = [(one.offset, one.rows, one.length, *step) for one, step in zip(self.tensors, steps, strict=True)]
        return send(rows, torch.empty(len(rows), 5, dtype=torch.int32, device=self._device))

    @cached_property
    def panels(self) -> Tensor:
        """Return a tensor and the first row of it that a program takes: int32[panels, 2]."""
        rows = [(i, row) for i, one in enumerate(self.tensors) for row in range(0, one.rows, PANEL)]
        return send(rows, torch.empty(len(rows), 2, dtype=torch.int32, device=self._device))

    def shares(self, k: int, turn: int) -> Tensor:
        """Return each tensor's share of k in one turn, see `sparsifiers.rows.deal`: int32[tensors, 3].

        Of each row so many, how many rows get one more, and the first of these. Queues a copy.
        """
        rows = [(*divmod(share.count, share.matrix.rows), share.start) for share in deal(self.tensors, k, turn)]
        return send(rows, torch.empty(len(rows), 3, dtype=torch.int32, device=self._device))
