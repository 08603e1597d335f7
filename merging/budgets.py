# SPDX-License-Identifier: Apache-2.0
"""Budgets: how many elements each tensor may send, when important tensors are to send more."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from merging.checks import Elements, Reals


def loads(numel: ArrayLike, energy: ArrayLike, density: float, *, least: float = 0.0, most: float = 1.0) -> Elements:
    """Return K per tensor, floor(rho_i * p_i) as in AGTF: the `load` of a Profile for the planner agtf.

    rho_i is proportional to the energy per element, |g_i|^2 / p_i, clipped to `least` and `most`. It is
    scaled so that the sum of rho_i * p_i is density * sum of p; less where `most` limits it and others have
    no energy. All energies 0: every tensor gets `density`. The energies must be the same on every rank:
    reduce them first.

    Raises ValueError unless 0 <= least <= density <= most <= 1, and where an energy is negative or not finite.
    """
    sizes, energies = np.asarray(numel, dtype=np.float64), np.asarray(energy, dtype=np.float64)
    if not 0 <= least <= density <= most <= 1:
        raise ValueError(f"importance: need 0 <= least <= density <= most <= 1, got {least}, {density}, {most}")
    if sizes.ndim != 1 or sizes.shape != energies.shape:
        raise ValueError(
            f"importance: numel has shape {sizes.shape}, energy {energies.shape}: expected one number per tensor"
        )
    if not (np.isfinite(energies) & (energies >= 0)).all():
        raise ValueError("importance: energies must be finite and not negative. Measure them again.")
    weights = energies / sizes
    top = weights.max(initial=0.0)
    if not top:
        return _rounded(density * sizes)
    weights = weights / top
    wanted = density * sizes.sum()
    low, high = 0.0, 1.0 / max(float(weights[weights > 0].min()), 1e-300)
    for _ in range(200):
        middle = 0.5 * (low + high)
        if np.clip(middle * weights, least, most) @ sizes < wanted:
            low = middle
        else:
            high = middle
    return _rounded(np.clip(high * weights, least, most) * sizes)


def _rounded(counts: Reals) -> Elements:
    """Return the counts rounded down, those a rounding error below a whole number to that number."""
    return np.asarray(np.floor(counts * (1 + 1e-12) + 1e-9), dtype=np.int64)
