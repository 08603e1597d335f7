# SPDX-License-Identifier: Apache-2.0
"""Gaussian-k: the quantile of a normal distribution, corrected until the sample's count agrees."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsifiers.base import Request
from sparsifiers.estimated import Estimated, Sample, corrected

EVALUATIONS = 6


def normal_quantile(x: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return sigma z with z = Phi^-1(1 - rho / 2), and the slope of ln count against its logarithm.

    x: float32 [m]; wanted, which is rho m, and the results: 0-dim.

    Of a normal distribution with mean 0 and deviation sigma the fraction rho exceeds sigma z in magnitude, half of it
    in either tail. Shi, Chu, Cheung and See, "Understanding Top-k Sparsification in Distributed Deep Learning", 2019.
    The paper adds the mean of a and compares |a| with the sum, which for a mean other than 0 is right for neither tail.
    The slope is -z phi(z) / Q(z), about -z**2 in the tail.
    """
    part = (wanted / (2 * len(x))).clamp(max=0.5)
    z = -torch.special.ndtri(part)
    density = (-0.5 * z.square()).exp() * 0.3989423
    return torch.sqrt(torch.dot(x, x) / len(x)) * z, -z * density / part


class GaussianK(Estimated):
    """Sparsifier by the threshold that a normal distribution of the same spread would need.

    It costs one sum over a sample, a few counts and one pass, whatever k. The published start fits where the gradient
    is nearly normal; on heavier tails it lets 2 to 20 times k through, and the authors' factors 0.5 and 1.5 then
    oscillate; here at most six counts of the sample correct it (`threshold_correction.corrected`). It is the
    natural choice for large batches; elsewhere sidco-gp starts closer.
    """

    name = "gaussiank"

    def _estimate(self, sample: Sample, request: Request) -> Tensor:
        eta, slope = normal_quantile(sample.x, sample.wanted)
        return corrected(sample.x, sample.wanted, eta, slope, EVALUATIONS)
