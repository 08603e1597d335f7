# SPDX-License-Identifier: Apache-2.0
"""Gradients that lie where sums are written in place, in a round that has to be repeated after a new agreement."""

from __future__ import annotations

import pytest
import torch
from support import agreed, on_ranks, seeded, wrap
from torch import Tensor, nn

from agmerge.exchanges.dense import LARGE

BOTH = torch.tensor([1.0, 2.0])  # what rank 0 and rank 1 add to a gradient


class Three(nn.Module):
    """Two parameters, which are summed where they lie if they are large, and one that may be frozen."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.always = nn.Parameter(torch.zeros(numel))
        self.seldom = nn.Parameter(torch.zeros(numel))  # in step 2, of rank 0 only
        self.late = nn.Parameter(torch.zeros(8), requires_grad=False)

    def loss(self, rank: int, step: int) -> Tensor:
        """Return a loss whose gradients are ``rank + 1`` everywhere, and 1 for ``late``."""
        total = (rank + 1) * self.always.sum() + self.late.sum()
        return total if step == 2 and rank == 1 else total + (rank + 1) * self.seldom.sum()


@pytest.mark.whole
@pytest.mark.parametrize("numel", [8, LARGE])
@pytest.mark.parametrize("set_to_none", [True, False], ids=["None", "views of the last updates"])
@pytest.mark.parametrize("reason", ["unfrozen on all ranks", "loaded on rank 0", "loaded on rank 1"])
def test_the_second_attempt_finds_the_gradients_that_the_first_one_had(
    reason: str, set_to_none: bool, numel: int
) -> None:
    """Neither those that hooks have handed over nor those that are asked for late may hold a sum by then."""

    def body(rank: int, model: Three) -> list[float]:
        optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=1.0), compression="none", merging="layerwise")
        for step in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            if step == 2 and reason == "unfrozen on all ranks":
                model.late.requires_grad_()
            elif step == 2 and reason == f"loaded on rank {rank}":
                optimizer.load_state_dict(optimizer.state_dict())
            model.loss(rank, step).backward()
            optimizer.step()
        assert all(float(p.min()) == float(p.max()) for p in model.parameters())
        return [float(p[0]) for p in model.parameters()]

    mean = float(BOTH.mean())
    late = -1.0 if reason == "unfrozen on all ranks" else 0.0
    assert agreed(on_ranks(2, seeded(lambda: Three(numel)), body)) == [-3 * mean, -2 * mean - 0.5, late]
