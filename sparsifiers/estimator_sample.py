# SPDX-License-Identifier: Apache-2.0
"""Prepare a small sample of a vector, to fit a threshold to it, without waiting for a device."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from sparsifiers.arguments import Request
from sparsifiers.device import keys_of


@dataclass(frozen=True)
class Sample:
    """Sample that an estimator is fitted to, on the device of the vector."""

    x: Tensor  # float32 [m], magnitudes in units of `unit`, ascending, 0 for NaN and inf
    unit: Tensor  # a power of two, fp64 0-dim
    wanted: Tensor  # how many of x should reach the threshold, float32 0-dim


@lru_cache(maxsize=256)
def stride_for(n: int, size: int) -> int:
    """Return the largest prime at most n / size, so that hardly a period in the data fits it; 1 for short vectors."""
    stride = max(1, n // size)
    while any(stride % divisor == 0 for divisor in range(2, math.isqrt(stride) + 1)):
        stride -= 1
    return stride


def strided(vector: Tensor, size: int, request: Request) -> Tensor:
    """View at least `size` elements of `vector` (all, if it has fewer); the phase depends on (key, step)."""
    stride = stride_for(vector.numel(), size)
    if stride == 1:
        return vector
    return vector[random.Random(f"{request.key}/{request.step}").randrange(stride) :: stride]


def normalised(elements: Tensor, density: float) -> Sample:
    """Make a Sample of elements, floats [m], of a vector of which the fraction `density` is wanted.

    Non-finite elements are always sent: they count among the wanted ones, and not in the fit. Division by
    a power of two is exact, so that scaling a vector by one changes nothing that follows.
    """
    keys = keys_of(elements)
    special = keys >= int(torch.tensor(torch.inf, dtype=elements.dtype).view(keys.dtype))
    keys.masked_fill_(special, 0)
    if keys.device.type == "cpu":
        keys = torch.from_numpy(np.sort(keys.numpy()))  # thirty times as fast as torch's
    else:
        keys = keys.sort().values
    x = keys.view(elements.dtype)
    x = x if x.dtype == torch.float64 else x.float()
    largest = x[-1]
    unit = torch.where(largest > 0, largest / (2 * torch.frexp(largest).mantissa), torch.ones_like(largest))
    wanted = (density * len(x) - torch.count_nonzero(special)).clamp_min(0.5)
    return Sample((x / unit).float(), unit.double(), wanted.float())
