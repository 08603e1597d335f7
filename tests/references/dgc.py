# SPDX-License-Identifier: Apache-2.0
"""Deep gradient compression: Lin, Han, Mao, Wang and Dally, ICLR 2018 (arXiv 1712.01887).

A rank sends the k largest coordinates of what it has not sent yet. Plain momentum would then act on old gradients only
when they arrive. So momentum comes first, and it is the velocity that is added up, selected from and sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class DGC:
    """All ranks of deep gradient compression for one tensor, 1-D."""

    def __init__(
        self,
        ranks: int,
        like: Tensor,
        k: int,
        momentum: float,
        *,
        nesterov: bool = False,
        masking: bool = True,
        clipping: float | None = None,
    ) -> None:
        """Begin with nothing unsent. ``like``: any tensor of that length and dtype. ``k``: coordinates a rank sends."""
        self.k, self.m, self.nesterov, self.masking, self.clipping = k, momentum, nesterov, masking, clipping
        self.u = [torch.zeros_like(like) for _ in range(ranks)]  # momentum
        self.v = [torch.zeros_like(like) for _ in range(ranks)]  # velocity that is not sent yet

    def step(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the update of one step, which the optimizer applies without momentum."""
        update = torch.zeros_like(self.u[0])
        for g, u, v in zip(gradients, self.u, self.v, strict=True):
            if self.clipping is not None:  # section 3.2: each of N ranks clips to N^(-1/2) of the bound of the sum
                g = g * min(1.0, self.clipping * len(gradients) ** -0.5 / float(g.norm()))
            if self.nesterov:  # appendix: u = m (u + g), v = v + u + g
                u.add_(g).mul_(self.m)
                v.add_(u + g)
            else:  # equation 7: u = m u + g, v = v + u
                u.mul_(self.m).add_(g)
                v.add_(u)
            sent = v.abs().topk(self.k).indices  # section 3.1: the rest stays in v
            update[sent] += v[sent] / len(gradients)
            v[sent] = 0
            if self.masking:  # section 3.3: what is sent has no momentum left that would carry it on, stale
                u[sent] = 0
        return update
