# SPDX-License-Identifier: Apache-2.0
"""SIDCo: the quantile of a fitted distribution, in stages that each fit the tail beyond the last."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from sparsifiers.base import Request
from sparsifiers.estimated import Estimated, Sample, above, corrected, off

# Distributions, fitted to magnitudes: which threshold does a fraction `delta` exceed?
#
# Abdelmoniem, Elzanaty, Alouini and Canini, "An Efficient Statistical-based Gradient Compression Technique for
# Distributed Training Systems" (SIDCo), MLSys 2021. Everything is 0-dim float32 on any device unless said otherwise;
# delta is in (0, 1]. All are equivariant: c times the data gives c times the threshold.

SHAPES = (-4.0, 0.45)  # of the Pareto: its variance, from which the shape is read, is finite below 0.5
POINTS, ROUNDS = 64, 4  # 63**4 intervals of the range of ln quantile: 2e-6


def moments(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return how many elements of y, float32 [m] >= 0, ascending, are positive, and their mean and variance."""
    count = above(y, y.new_zeros(()))
    mean = y.sum() / count
    return count, mean, torch.dot(y, y) / count - mean.square()


def exponential(mean: Tensor, delta: Tensor) -> Tensor:
    """Return -mean ln delta: |a| is exponential where a is Laplacian, and P(|a| > t) = exp(-t / mean)."""
    return -mean * delta.log()


def pareto(mean: Tensor, variance: Tensor, delta: Tensor) -> Tensor:
    """Return beta / alpha (delta**-alpha - 1): generalised Pareto fitted by moments.

    alpha = (1 - q) / 2 and beta = mu (1 + q) / 2 with q = mu**2 / variance, alpha clamped to SHAPES. alpha -> 0 is
    the exponential.
    """
    least, most = (1 - 2 * shape for shape in reversed(SHAPES))
    q = (mean.square() / variance.clamp_min(0.0)).clamp(least, most)
    alpha, beta = (1 - q) / 2, mean * (1 + q) / 2
    flat = alpha.abs() < 1e-4
    alpha = torch.where(flat, torch.ones_like(alpha), alpha)
    return torch.where(flat, -beta * delta.log(), beta * torch.expm1(-alpha * delta.log()) / alpha)


def gamma(x: Tensor, mean: Tensor, delta: Tensor) -> Tensor:
    """Return beta P^-1(alpha, 1 - delta): gamma fitted to the positive elements of x, float32 [m], of that mean.

    s = ln mu - mean ln x, alpha = (3 - s + sqrt((s - 3)**2 + 24 s)) / 12 s, beta = mu / alpha. The paper inverts
    the incomplete gamma function by -beta (ln delta + ln Gamma(alpha)). That is exact at alpha = 1 only and
    off by a factor of 2 in count elsewhere; here it is inverted numerically.
    """
    present = x > 0
    logs = torch.where(present, x / mean, torch.ones_like(mean)).log().sum()
    s = (-logs / torch.count_nonzero(present)).nan_to_num(nan=1.0).clamp_min(1e-3)  # gammaincc is slow on NaN
    alpha = (3 - s + ((s - 3).square() + 24 * s).sqrt()) / (12 * s)
    return (gamma_quantile(alpha.double(), delta.double()) * mean / alpha).float()


def gamma_quantile(alpha: Tensor, delta: Tensor) -> Tensor:
    """Return t with Q(alpha, t) = delta, fp64 0-dim as alpha and delta are.

    Q is the regularised upper incomplete gamma function. It falls in t; a grid in ln t is refined ROUNDS times around
    where it crosses delta. t lies between 1e-13, below which all of interest is 0, and 40 + 4 alpha, which less than
    1e-17 exceed.
    """
    steps = torch.linspace(0, 1, POINTS, dtype=torch.float64, device=alpha.device)
    low, width = torch.full_like(alpha, -30.0), (40 + 4 * alpha).log() + 30.0
    for _ in range(ROUNDS):
        above = torch.special.gammaincc(alpha, (low + width * steps).exp()) >= delta
        low = low + width * (torch.count_nonzero(above) - 1).clamp_min(0) / (POINTS - 1)
        width = width / (POINTS - 1)
    return (low + width / 2).exp()


# The sparsifiers.

Law = Literal["e", "gp", "gamma"]
FIRST = 0.25  # fraction that the first of several stages lets through
MOST_STAGES = 5
PERIOD = 5  # calls for which a number of stages is kept
EVALUATIONS = 3  # two corrections
EXCEEDANCES = 32  # fewer are no basis for a fit


def staged(x: Tensor, wanted: Tensor, stages: int, law: Law) -> Tensor:
    """Return the threshold of `stages` peaks over thresholds, 0-dim, uncorrected, as SIDCo has it.

    x: float32 [m] >= 0, ascending; wanted: 0-dim; stages >= 1; law: of the first stage.

    Zeros take no part: delta is wanted over the non-zeros. The
    first stage fits `law` to all, for FIRST of them; each later one fits the excess over the last threshold,
    for an equal share of the remaining factor: exponential for "e", generalised Pareto for the others (a tail of any
    law is nearly one). A stage without enough exceedances ends it.
    """
    count, mean, variance = moments(x)
    delta = (wanted / count).clamp_max(1.0)
    first = delta if stages == 1 else delta.clamp_min(FIRST)
    if law == "e":
        eta = exponential(mean, first)
    elif law == "gp":
        eta = pareto(mean, variance, first)
    else:
        eta = gamma(x, mean, first)
    for _ in range(stages - 1):
        share = (delta / first) ** (1 / (stages - 1))
        count, mean, variance = moments((x - eta).clamp_min(0))
        further = exponential(mean, share) if law == "e" else pareto(mean, variance, share)
        eta = torch.where(count >= EXCEEDANCES, eta + further, eta)
    return eta


def tail_slope(x: Tensor, eta: Tensor) -> Tensor:
    """Return d ln count / d ln eta of an exponential tail beyond eta: -eta / mean(x - eta | x > eta), 0-dim."""
    return -eta / moments((x - eta).clamp_min(0))[1]


class SIDCo(Estimated):
    """Sparsifier by the threshold of a fitted sparsity-inducing distribution.

    It costs two sums over a sample per stage and one pass over the vector. sidco-gp suits all shapes of tail and is
    the one to choose; sidco-e is cheapest and best where gradients are Laplacian; sidco-gamma fits gradients
    that pile up at zero. At most two corrections by the sample's count follow (`threshold_correction.corrected`).

    The number of stages is chosen per key from 1 to log2(1 / density), at most 5: every fifth call all of
    them are tried on the sample, and the one with the count closest to the wanted one stays. The published
    rule (a stage more if too few were selected, one less if too many) cannot leave one stage where that
    selects too many, as it does on heavy tails. On a device the trial is part of every call, because its
    outcome may not be read.
    """

    law: Law  # of the first stage, see `staged`

    def _estimate(self, sample: Sample, request: Request) -> Tensor:
        x, wanted = sample.x, sample.wanted
        numel = sum(map(math.prod, request.shapes))
        most = max(1, min(MOST_STAGES, math.ceil(math.log2(numel / request.k))))
        kept = self._recall(request.key, numel) if x.device.type == "cpu" else None
        if kept is not None and kept[1] < PERIOD:
            stages, calls = kept
            self._keep(request.key, numel, stages, calls + 1)
            eta = staged(x, wanted, min(stages, most), self.law)
        else:
            tried = [staged(x, wanted, stages, self.law) for stages in range(1, most + 1)]
            errors = torch.stack([off(x, wanted, eta).abs() for eta in tried])
            best = errors.nan_to_num(nan=torch.inf).argmin()
            if x.device.type == "cpu":
                self._keep(request.key, numel, int(best) + 1, 1)
            eta = torch.stack(tried).gather(0, best.view(1))[0]
        return corrected(x, wanted, eta, tail_slope(x, eta), EVALUATIONS)


class SIDCoE(SIDCo):
    """SIDCo with the exponential law in all stages."""

    name, law = "sidco-e", "e"


class SIDCoGP(SIDCo):
    """SIDCo with the generalised Pareto law in all stages."""

    name, law = "sidco-gp", "gp"


class SIDCoGamma(SIDCo):
    """SIDCo with a gamma law in the first stage and generalised Pareto laws in the others."""

    name, law = "sidco-gamma", "gamma"
