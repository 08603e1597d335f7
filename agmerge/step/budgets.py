# SPDX-License-Identifier: Apache-2.0
"""Budgets: how many elements a step sends of each tensor and of each segment that is selected from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agmerge.step.density_policy import DensityPolicy
from agmerge.step.importance import GradientEnergy
from agmerge.tensors.layout import Segment, Slot


class Budgets:
    """Budgets of one agreement: those of the density, or a tensor's own, once they were chosen by importance.

    ``selects``: whether a sparsifier selects from any tensor.
    """

    def __init__(self, density: DensityPolicy, slots: Sequence[Slot], *, selects: bool) -> None:
        self._density, self._slots = density, slots
        self._chosen: tuple[int, ...] | None = None  # by slot: elements to send, by importance, once that is known
        self.energy = GradientEnergy() if density.by_importance and selects else None  # None: not chosen by it
        self._fixed: dict[str, int] = {}  # of segments, by key, where they are the same in every step

    @property
    def are_chosen(self) -> bool:
        """Return whether tensors have budgets of their own, by importance."""
        return self._chosen is not None

    def of_tensor(self, slot: Slot, step: int) -> int:
        """Return how many elements of one tensor a step sends, if it is selected from by itself."""
        if self._chosen is None:
            return self._density.budget(slot.numel, step, slot.tensor_class.density)
        return self._density.budget_by_importance(self._chosen[slot.index], slot.numel, step)

    def of_segment(self, segment: Segment, step: int) -> int:
        """Return how many elements of the segment a step sends: where tensors have budgets of their own, their sum."""
        known = self._fixed.get(segment.key)
        if known is not None:
            return known
        if self._chosen is None:
            count = self._density.budget(segment.numel, step, segment.tensor_class.density)
        else:
            count = sum(self._of_part(segment, slot, step) for slot in segment.slots)
        if not self._density.varies:
            self._fixed[segment.key] = count
        return count

    def _of_part(self, segment: Segment, slot: Slot, step: int) -> int:
        """Return the share of a tensor's budget for its slice in the segment, rounded up."""
        start, stop = segment.inside(slot)
        return -(-self.of_tensor(slot, step) * (stop - start) // slot.numel)

    def forget_segments(self) -> None:
        """Count every segment again: another plan makes other segments under the same keys."""
        self._fixed = {}

    def choose(self, budgets: tuple[int, ...]) -> None:
        """Send that many elements of each tensor from now on, by slot; no more gradient energy is summed."""
        self.energy, self._chosen, self._fixed = None, budgets, {}

    def restore(self, budgets: Mapping[str, int]) -> None:
        """Use earlier budgets by importance, by name, if they cover all tensors here."""
        if self.energy is not None and all(slot.name in budgets for slot in self._slots):
            self.choose(tuple(budgets[slot.name] for slot in self._slots))

    def by_name(self) -> dict[str, int] | None:
        """Return how many elements of each tensor to send, by importance; None while that is not known."""
        return None if self._chosen is None else {slot.name: self._chosen[slot.index] for slot in self._slots}
