# SPDX-License-Identifier: Apache-2.0
"""Count a sample against a threshold, and move the threshold until the count is the wanted one."""

from __future__ import annotations

import torch
from torch import Tensor

SLOPES = (-1e5, -0.25)  # of ln count against ln eta: a tail that ends, and one heavier than any with a mean


def reaching(x: Tensor, eta: Tensor) -> Tensor:
    """Return how many elements of x, ascending [m], are at least eta: 0-dim int64."""
    return len(x) - torch.searchsorted(x, eta)


def above(x: Tensor, eta: Tensor) -> Tensor:
    """Return how many elements of x, ascending [m], are larger than eta: 0-dim int64."""
    return len(x) - torch.searchsorted(x, eta, right=True)


def near(count: Tensor, wanted: Tensor) -> Tensor:
    """Return whether a sample's count is as near `wanted` as it can be: to 10 %, or two standard deviations up to 20 %.

    count, wanted: 0-dim float32. Returns 0-dim bool.
    """
    slack = (2 / wanted.sqrt()).clamp(min=0.1, max=0.2)
    return (count / wanted - 1).abs() <= slack


def off(x: Tensor, wanted: Tensor, eta: Tensor) -> Tensor:
    """Return how far the count at eta is from `wanted`: ln(count / wanted), above 0 if too many; finite for a 0 too.

    x: float32 [m], ascending; wanted, eta and the result: 0-dim. Half an element is added to both counts.
    """
    return ((reaching(x, eta) + 0.5) / (wanted + 0.5)).log()


def corrected(x: Tensor, wanted: Tensor, eta: Tensor, slope: Tensor, evaluations: int) -> Tensor:
    """Return the threshold, of at most `evaluations` tried from eta on, with the count closest to `wanted`.

    x: float32 [m] >= 0, ascending; wanted: 0-dim; eta: the first that is tried, 0-dim; slope: d ln count / d ln eta
    there, 0-dim, below 0; evaluations: counts of x.

    Steps are secants of ln count against ln eta, in which the tails of a normal, Laplace or power law are nearly
    straight. One that leaves the bracket of the counts seen so far is replaced by its middle, so nothing oscillates. A
    start that is `near` is kept.
    """
    place = torch.minimum(eta, x[-1]).clamp_min(torch.finfo(x.dtype).tiny).log()
    slope = slope.nan_to_num(nan=-4.0).clamp(*SLOPES)
    low, high = place - torch.inf, place + torch.inf
    best, least = place, torch.full_like(place, torch.inf)
    before, error_before = place, place
    for turn in range(evaluations):
        error = off(x, wanted, place.exp())
        distance = torch.where(near((wanted + 0.5) * error.exp(), wanted), torch.zeros_like(error), error.abs())
        best, least = torch.where(distance < least, place, best), torch.minimum(distance, least)
        low, high = torch.where(error > 0, place, low), torch.where(error > 0, high, place)
        if turn:
            secant = (error - error_before) / (place - before)
            slope = torch.where(secant.isfinite(), secant, slope).clamp(*SLOPES)
        before, error_before = place, error
        following = place - error / slope
        inside = (following > low) & (following < high)
        place = torch.where(inside, following, (low + high) / 2)
    return best.exp()
