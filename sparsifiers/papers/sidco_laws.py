# SPDX-License-Identifier: Apache-2.0
"""Fit the distributions of SIDCo to magnitudes, each as: which threshold does a fraction `delta` exceed?

Abdelmoniem, Elzanaty, Alouini and Canini, "An Efficient Statistical-based Gradient Compression Technique for
Distributed Training Systems" (SIDCo), MLSys 2021. Everything is 0-dim float32 on any device unless said
otherwise; delta is in (0, 1]. All are equivariant: c times the data gives c times the threshold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsifiers.threshold_correction import above

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
