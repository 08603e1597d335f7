# SPDX-License-Identifier: Apache-2.0
"""Loads of tensors inside one budget: important ones send more, and those too small to select from go dense.

ADTopk, "Partial sparsification" (the extended paper, after HPDC 2024): tensors of up to p elements, the size cut, are
not sparsified, and the density of the others falls so far that the volume stays. Published code takes rho' = max(rho,
...), which is always rho and exceeds the budget, and multiplies the load by the density twice; here neither. rho is the
density, S the elements of all tensors, F those of dense tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from merging.costs import Profile
from merging.measured import Measurements, best, step_end
from merging.plan import Elements, Reals
from merging.planner import Planner

# Budgets, when important tensors are to send more.


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


# Size cuts.

SHARE = 0.5  # of the budget, at most, is spent on dense tensors: the others keep half of their density at least
MOST = 16  # cuts that are planned for; more are thinned out evenly


def feasible(sizes: Sequence[int], exempt: Sequence[bool], density: float) -> tuple[int, ...]:
    """Return the size cuts p with F <= rho S / 2, ascending: 0 first, then sizes of tensors.

    `exempt` tensors go dense whatever the cut, and count in S and F. Where they alone are more than that half, there
    is no cut, not even 0: an empty tuple.
    """
    bound = SHARE * density * sum(sizes)
    cuts = [0, *sorted({size for size, always in zip(sizes, exempt, strict=True) if not always})]
    return tuple(cut for cut in cuts if _whole(sizes, exempt, cut) <= bound)


def remaining(sizes: Sequence[int], exempt: Sequence[bool], cut: int, density: float) -> float:
    """Return rho' = (rho S - F) / (S - F), the density of the others; with a feasible cut, rho / 2 to rho.

    F + rho' (S - F) is rho S: dense tensors are subtracted from the others' budget. Raises ValueError where nothing
    of the budget is left.
    """
    total, whole = sum(sizes), _whole(sizes, exempt, cut)
    if whole >= density * total:
        raise ValueError(
            f"partial: the cut {cut} sends {whole} of {total} elements uncompressed, but the density is {density}"
        )
    return (density * total - whole) / (total - whole)


def at(profile: Profile, sizes: Sequence[int], exempt: Sequence[bool], cut: int, density: float) -> Profile:
    """Return the profile as it would be with this cut, at most the one that it was measured with.

    `sizes` decide, `profile.numel` are the elements that a rank selects from (a shard, perhaps). A tensor that is dense
    with the cut must be dense in `profile`: its load is taken from there.
    """
    dense = np.array([always or size <= cut for size, always in zip(sizes, exempt, strict=True)])
    rest = remaining(sizes, exempt, cut, density)
    selected = np.clip(np.ceil(rest * profile.numel), 1, profile.numel).astype(np.int64)
    plain = profile.plain()
    plain["work"] = np.where(dense, 0, profile.numel)
    plain["load"] = np.where(dense, profile.load, selected)
    return Profile(**plain)


def choose(
    planner: Planner,
    measured: Measurements,
    sizes: Sequence[int],
    exempt: Sequence[bool],
    density: float,
    most: int,
    gain: float = 0.0,
) -> int:
    """Return the feasible cut, at most `most`, with which the planner's plan is predicted to end first.

    The paper's cost of a step, backward + selection of each layer + exchange of the whole load, is the prediction for
    one merge buffer in mode "ahead"; here it is that of the planner's own plan, with overlap. `measured` is of a step
    with the cut `most`. Of equals the largest is kept: it selects least; a smaller one must end sooner than the largest
    by more than the share `gain`. Raises ValueError where no cut is feasible.
    """
    cuts = [cut for cut in feasible(sizes, exempt, density) if cut <= most][::-1]
    if not cuts:
        raise ValueError("partial: no cut is feasible, because exempt tensors alone use more than half of the budget")
    ends = []
    for cut in _thinned(cuts):
        there = replace(measured, profile=at(measured.profile, sizes, exempt, cut, density))
        plan, mode = best(planner, there)
        ends.append((step_end(plan, there, mode), cut))
    chosen = min(ends, key=lambda end: end[0])
    return chosen[1] if chosen[0] * (1 + gain) < ends[0][0] else ends[0][1]


def _whole(sizes: Sequence[int], exempt: Sequence[bool], cut: int) -> int:
    """Return F."""
    return sum(size for size, always in zip(sizes, exempt, strict=True) if always or size <= cut)


def _thinned(cuts: Sequence[int]) -> list[int]:
    """Return at most MOST of the cuts, both ends among them."""
    if len(cuts) <= MOST:
        return list(cuts)
    return [cuts[int(place)] for place in np.linspace(0, len(cuts) - 1, MOST)]
