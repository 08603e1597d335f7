# SPDX-License-Identifier: Apache-2.0
"""Rotate blocks by a Hadamard matrix, with a fixed order of additions: torch's operations and compiled loops agree."""

from __future__ import annotations

import torch
from torch import Tensor


def hadamard(rows: Tensor) -> Tensor:
    """Return the product of each of ``rows``, (n, size), with the Hadamard matrix of that size, a power of two.

    It is not normalised: applied twice it multiplies by ``size``. Sylvester's construction by butterflies of distance
    1, 2, 4, ... (Fino and Algazi, 1976): each is one addition and one subtraction, so rounding has one order.
    """
    count, size = rows.shape
    distance = 1
    while distance < size:
        pairs = rows.view(count, size // (2 * distance), 2, distance)
        left, right = pairs[:, :, 0], pairs[:, :, 1]
        rows = torch.stack((left + right, left - right), dim=2).view(count, size)
        distance *= 2
    return rows


def folded(rows: Tensor) -> Tensor:
    """Return the sums of ``rows``, (n, size), size a power of two: (n,). Halves are added: rounding has one order."""
    half = rows.shape[1]
    while half > 1:
        half //= 2
        rows = rows[:, :half] + rows[:, half : 2 * half]
    return rows[:, 0]
