# SPDX-License-Identifier: Apache-2.0
"""RedSync: a threshold between the mean and the largest magnitude."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsifiers.base import Request
from sparsifiers.estimated import Estimated, Sample, number, reaching

EVALUATIONS = 24  # 2**24 keys are two octaves halved to the last bit


def bisected(x: Tensor, wanted: Tensor) -> Tensor:
    """Return mean + r (max - mean) with a count in [wanted, 2 wanted], with r found by bisection.

    x: float32 [m] >= 0, ascending; wanted and the result: 0-dim. Fang et al., "RedSync", JPDC 2019 (threshold binary
    search).

    r is halved in the space of the bits of the threshold, not in that of its value: with a heavy tail
    the wanted r lies within 1e-3 of 0, where the published bisection to 0.2 cannot come. The window leaves a
    margin for the sampling error to either side. Where fewer than wanted lie above the mean, r is below 0.
    """
    margin = torch.minimum(3 * wanted.sqrt(), 0.3 * wanted)
    least, most = wanted + margin, 2 * wanted - margin
    mean, high = x.mean(), x[-1].view(torch.int32)
    low = torch.where(reaching(x, mean) >= least, mean, torch.zeros_like(mean)).view(torch.int32)
    for _ in range(EVALUATIONS):
        middle = low + (high - low) // 2
        count = reaching(x, middle.view(torch.float32))
        low = torch.where(count >= least, middle, low)  # once both are the middle, they stay
        high = torch.where(count <= most, middle, high)
    return low.view(torch.float32)


def trimmed(x: Tensor, wanted: Tensor, decrement: float) -> Tensor:
    """Return mean + r (max - mean) for the first r of 1 - d, 1 - 2d, ..., 0 that surely at least `wanted` reach.

    x: float32 [m] >= 0, ascending; wanted and the result: 0-dim; decrement: d. Surely: by four standard deviations of
    the sample's count. If there is none it is the last r. RedSync (trimmed top-k).
    """
    mean, largest = x.mean(), x[-1]
    least = wanted + 4 * wanted.sqrt()
    eta = mean
    for turn in reversed(range(1, round(1 / decrement))):
        candidate = mean + (1 - turn * decrement) * (largest - mean)
        eta = torch.where(reaching(x, candidate) >= least, candidate, eta)
    return eta


class RedSync(Estimated):
    """Sparsifier of the k largest of the k to 2k coordinates above a threshold between mean and maximum.

    The published method sends up to 2k; here coordinates beyond k stay in the residual, so that all methods
    select the same number. It costs 26 counts over a sample and one pass over the vector, without an assumption
    about the distribution: the safe choice where gradients have no common shape.
    """

    name = "redsync"

    def _estimate(self, sample: Sample, request: Request) -> Tensor:
        return bisected(sample.x, sample.wanted)


class RedSyncTrim(Estimated):
    """Sparsifier of the k largest coordinates, searched for above a threshold that is lowered in steps.

    count is always k and the selection that of topk. On heavy tails every step lets far more than k through
    (30 times k is usual), and exact selection takes over at once. The paper uses it for layers of 128 KB to 4 MB.

    decrement: how much r falls in a step, in (0, 1); smaller trims closer and counts oftener.
    """

    name = "redsync-trim"
    least = 1.0  # it promises k

    def __init__(self, density: float = 0.01, decrement: float = 0.2) -> None:
        super().__init__(density)
        self.decrement = number("redsync-trim", "decrement", decrement)
        if not 0.01 <= self.decrement < 1.0:
            raise ValueError(f"redsync-trim: decrement must be in [0.01, 1), got {decrement!r}. The paper uses 0.2.")

    def options(self) -> dict[str, object]:
        return {"decrement": self.decrement}

    def _estimate(self, sample: Sample, request: Request) -> Tensor:
        return trimmed(sample.x, sample.wanted, self.decrement)
