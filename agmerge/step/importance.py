# SPDX-License-Identifier: Apache-2.0
"""Energy of gradients for ``density="importance"``, and how many elements each tensor may send by it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from agmerge.tensors.layout import Slot
from merging.budgets import loads

Energies = NDArray[np.float64]  # squared L2 norms, one a tensor
SPREAD = 10.0  # a tensor's density is at most so many times the mean, and at least 1 / so many


class GradientEnergy:
    """Sums of the squared L2 norms of this rank's gradients over the first steps, tensor by tensor."""

    def __init__(self) -> None:
        self._sums: dict[int, torch.Tensor] = {}  # by slot, each on its gradient's device

    def add(self, slot: Slot, gradient: torch.Tensor | None) -> None:
        """Add the squared norm of a gradient that is ready. Nothing waits for the device."""
        if gradient is not None:
            square = torch.linalg.vector_norm(gradient, dtype=torch.float32).square()
            self._sums[slot.index] = square + self._sums[slot.index] if slot.index in self._sums else square

    def of(self, slots: Sequence[Slot]) -> Energies:
        """Return the sums so far, (n,); 0 where no gradient has come. Waits for the devices."""
        return np.array([float(self._sums.get(slot.index, 0.0)) for slot in slots], dtype=np.float64)


def budgets_by_energy(slots: Sequence[Slot], energies: Energies, density: float) -> tuple[int, ...]:
    """Return the elements that each tensor may send in a step, by slot; 0 where nothing is selected.

    Args:
        slots: all n tensors, in the order of the layout.
        energies: (W, n), the sums of each of W ranks. Their mean counts; one that is not finite counts as 0.
        density: the share of the elements of sparse tensors that all of these send together.

    The share of a tensor grows with its energy per element, see :func:`merging.budgets.loads` (AGTF).
    """
    sparse = [slot for slot in slots if slot.tensor_class.sparse]
    mean = np.where(np.isfinite(energies), energies, 0.0).mean(axis=0)
    numel, energy = [slot.numel for slot in sparse], [mean[slot.index] for slot in sparse]
    counts = loads(numel, energy, density, least=density / SPREAD, most=min(1.0, density * SPREAD))
    budgets = [0] * len(slots)
    for slot, count in zip(sparse, counts.tolist(), strict=True):
        budgets[slot.index] = max(1, count)
    return tuple(budgets)
