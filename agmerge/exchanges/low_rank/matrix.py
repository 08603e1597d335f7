# SPDX-License-Identifier: Apache-2.0
"""Matrices of a message under way, and the operations that need one of them alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agmerge.exchanges.dense import largest_summand
from agmerge.exchanges.low_rank import factors
from agmerge.exchanges.low_rank.bases import Basis
from agmerge.exchanges.low_rank.factors import LEFT, RIGHT, Product
from agmerge.tensors.layout import Segment, Slot


@dataclass
class Matrix:
    """Tensor as a matrix (n, m), with the basis it is projected on and the factor that this gives."""

    segment: Segment  # of this tensor alone
    work: torch.Tensor  # (n, m): residual and gradient, less what was sent; a view
    update: torch.Tensor  # (n, m): is written in the end; a view
    basis: Basis  # of the last step; in the second round the first round's sum, orthonormal
    factor: torch.Tensor  # (r, length): `work` projected on the basis, as receivers read it; then the sum of all ranks
    wire: torch.dtype  # in which the factor travels
    both: bool  # there is a second round
    # bool[length of the basis]: rows (of a basis of the RIGHT: columns) of `work` that are zero where the basis is not.
    # None: there are none; or the basis was made of this step's matrices, and is zero there; or it is not known yet.
    empty: torch.Tensor | None = None

    @property
    def slot(self) -> Slot:
        """Return the place of the tensor."""
        return self.segment.slots[0]

    def project(self) -> None:
        """Write the factor of ``work``."""
        factors.project(self.work, self.basis.side, self.basis.rows, self.factor)

    def find_empty(self, *terms: torch.Tensor) -> None:
        """Set :attr:`empty`, if the basis is one of the last step; ``terms``: add up to ``work``, each (n, m)."""
        if not self.both:
            self.empty = factors.empty_lanes(self.basis.side, self.basis.rows, *terms)

    def find_empty_behind(self) -> None:
        """Set :attr:`empty` of a matrix on the host that has its factor, and still all of its work.

        If the factor is zero, this rank sends nothing of any row, so all may be left out without a look at them.
        """
        if not self.both and not self.factor.any():
            self.empty = self.basis.rows.any(0)
        else:
            self.find_empty(self.work)

    def leave_out(self, lanes: torch.Tensor) -> None:
        """Make the product zero in some rows, or columns with a basis of the RIGHT. ``lanes``: bool[length]."""
        self.basis = Basis(self.basis.side, self.basis.rows.masked_fill(lanes, 0.0))

    def add_and_project(self, residual: torch.Tensor, gradient: torch.Tensor, *, moves: bool) -> bool | None:
        """Write ``work = residual + gradient`` and its factor, in one pass; see :func:`factors.add_and_project`.

        If :attr:`is_taken_off`, the sent product is subtracted in the same pass; if ``moves``, the gradient is copied
        to the update.
        """
        residual, gradient = residual.view_as(self.work), gradient.view_as(self.work)
        if self.basis.side == RIGHT:  # before the product is subtracted
            self.find_empty(residual, gradient)
        finite = factors.add_and_project(
            self.work,
            residual,
            gradient,
            self.basis.side,
            self.basis.rows,
            self.factor,
            off=self.is_taken_off,
            copy=self.update if moves else None,
        )
        if self.basis.side == LEFT and finite:
            self.find_empty_behind()
        return finite

    @property
    def is_taken_off(self) -> bool:
        """Return whether one pass can subtract the product: each number of a factor is of one row, and unrounded."""
        return self.is_known and self.basis.side == RIGHT and self.wire == self.work.dtype

    @property
    def is_known(self) -> bool:
        """Return whether the product is known before other ranks' factors are: no second round, no :attr:`empty`."""
        return not self.both and self.empty is None and self.work.device.type == "cpu"

    def round_factor(self, workers: int) -> None:
        """Round the factor as it will be read, in the dtype of the work; ``workers`` of them have a finite sum."""
        if self.wire != self.factor.dtype:
            limit = largest_summand(self.wire, workers)
            self.factor.copy_(self.factor.clamp_(-limit, limit).to(self.wire))

    def product(self) -> Product:
        """Return the product of basis and factor: of what this rank sends, or, once summed, of all ranks."""
        rows, factor = self.basis.rows, self.factor.to(self.work.dtype)
        return Product(rows, factor) if self.basis.side == LEFT else Product(factor, rows)

    def write_update(self, scale: float, scratch: torch.Tensor | None) -> None:
        """Write ``update = scale * product``. ``scratch``: (n, m), in the work's dtype, if the update's differs."""
        out = self.update if scratch is None else scratch
        factors.product(*self.product(), scale, out)
        if scratch is not None:
            self.update.copy_(scratch)
