"""How much energy gradients have, and how much selection leaves behind: what densities by importance go by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from agmerge.metrics.clock import Seconds
from agmerge.tensors.layout import Slot

Energies = Seconds  # float64, one a tensor


class GradientEnergy:
    """The squared L2 norms of this rank's gradients, added up over the first steps, tensor by tensor."""

    def __init__(self) -> None:
        self._sums: dict[int, torch.Tensor] = {}

    def add(self, slot: Slot, gradient: torch.Tensor | None) -> None:
        """A gradient is ready. Nothing waits for the device."""
        if gradient is not None:
            square = torch.linalg.vector_norm(gradient, dtype=torch.float32).square()
            self._sums[slot.index] = square + self._sums[slot.index] if slot.index in self._sums else square

    def of(self, slots: Sequence[Slot]) -> Energies:
        """The sums so far, (n,)."""
        return np.array([float(self._sums.get(slot.index, 0.0)) for slot in slots], dtype=np.float64)


def left_behind(slots: Iterable[Slot], residuals: dict[str, torch.Tensor]) -> Energies:
    """The squared L2 norm of each tensor's residual, (n,): its noise; 0 where there is none."""
    norms = [torch.linalg.vector_norm(residuals[slot.name]) if slot.name in residuals else 0.0 for slot in slots]
    return np.array([float(norm) ** 2 for norm in norms], dtype=np.float64)
