# SPDX-License-Identifier: Apache-2.0
"""Budgets of a step, elements to send of each tensor: by ``density=``, ``warmup=`` and ``dense="partial"``."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import sparsifiers
from agmerge.backends.handshake import Fact
from agmerge.tensors.layout import Segment, Slot
from agmerge.tensors.parameters import ParameterInfo
from merging import dense_cutoff
from merging.dense_cutoff import loads
from sparsifiers import Kind

# ``dense="partial"``: which tensors go dense beside the exempt ones, so that the volume stays.
#
# The cut only ever falls. It starts at the largest feasible one, when no tensor has a residual; a smaller one makes
# dense tensors sparse. If it rose, a residual would be left without messages that send it.

NAME = "partial"
Exempt = Callable[[str, torch.Tensor], bool]  # whether a tensor goes dense whatever the cut
CROWDED = (
    "AGM706: dense='partial' has no effect: small parameters (fewer than two dimensions, or than 1024 elements), "
    "which are always uncompressed, take more than half of density={density:g}. Raise density, or remove dense=."
)


@dataclass(frozen=True)
class DenseCutoff:
    """Size up to which tensors go dense, so that small layers are not sparsified."""

    elements: int | None = None  # None: not chosen yet, before the first agreement
    final: bool = False  # chosen from measured step times: it does not change any more

    def __str__(self) -> str:
        return "by rule" if self.elements is None else f"up to {self.elements} elements{', settled' * self.final}"


def largest_feasible(
    members: Sequence[ParameterInfo], cutoff: DenseCutoff, density: float, exempt: Exempt
) -> int | None:
    """Return the largest feasible cutoff, in elements, that is not above the one so far; None: none is feasible."""
    feasible = dense_cutoff.feasible(*_sizes_and_exempt(members, exempt), density)
    return max((cut for cut in feasible if cutoff.elements is None or cut <= cutoff.elements), default=None)


def assign_classes(
    members: Sequence[ParameterInfo], cutoff: DenseCutoff, density: float, exempt: Exempt
) -> list[ParameterInfo]:
    """Return the parameters with their treatment, and the density of those that are still selected from.

    Args:
        members: all that take part.
        cutoff: the one in use; none above it is taken.
        density: of all elements together, the script's.
        exempt: whether a tensor goes dense whatever the cutoff.
    """
    cut = largest_feasible(members, cutoff, density, exempt)
    sizes, always = _sizes_and_exempt(members, exempt)
    rest = None if cut is None else dense_cutoff.remaining(sizes, always, cut, density)
    dense = [whole or size <= (cut or 0) for size, whole in zip(sizes, always, strict=True)]
    return [
        replace(member, kind=Kind.DENSE if whole else Kind.SPARSE, density=None if whole else rest)
        for member, whole in zip(members, dense, strict=True)
    ]


def with_cutoff_for(
    members: Sequence[ParameterInfo], cutoff: DenseCutoff, density: float, exempt: Exempt, *, warns: bool
) -> DenseCutoff:
    """Return the cutoff from now on, for these members. ``warns``: this rank does, where none is feasible."""
    cut = largest_feasible(members, cutoff, density, exempt)
    if cut is None and cutoff.elements != 0 and warns:
        warnings.warn(CROWDED.format(density=density), stacklevel=2)
    return replace(cutoff, elements=cut or 0)


def to_checkpoint(cutoff: DenseCutoff | None) -> tuple[int | None, bool] | None:
    """Return the cutoff as a checkpoint has it: (elements, final), or None where there is none."""
    return None if cutoff is None else (cutoff.elements, cutoff.final)


def from_checkpoint(cutoff: DenseCutoff | None, section: Mapping[str, Any]) -> DenseCutoff | None:
    """Return the cutoff of a checkpoint's ``section``; ``cutoff``: the one of the script's arguments, None for others.

    A checkpoint without a cutoff may have residuals of any tensor, so that no more may go dense.
    """
    if cutoff is None or not section["steps"]:
        return cutoff
    return DenseCutoff(*(section["partial"] or (0, True)))


def _sizes_and_exempt(members: Sequence[ParameterInfo], exempt: Exempt) -> tuple[list[int], list[bool]]:
    """Return the elements of each member, and whether it is exempt."""
    sizes = [member.local.numel() for member in members]
    return sizes, [exempt(member.name, member.local) for member in members]


# ``density=`` and ``warmup=``.

DENSITY = 0.01  # the default
IMPORTANCE = "importance"  # density=, by the energy of gradients


@dataclass(frozen=True)
class Schedule:
    """Function from a step and the target density to the density: ``schedule(step, target)``."""

    text: str  # which ranks compare
    density: Callable[[int, float], float]  # by step (committed exchanges so far) and target density

    def __call__(self, step: int, target: float) -> float:
        """Return the density of ``step`` around ``target``; ``ValueError`` unless it lies in (0, 1]."""
        density = self.density(step, target)
        if isinstance(density, bool) or not isinstance(density, (int, float)) or not 0.0 < density <= 1.0:
            raise ValueError(f"warmup: the density of step {step} must be in (0, 1], got {density!r}")
        return float(density)


@dataclass(frozen=True)
class DensityPolicy:
    """Budgets by the density that a script asks for: elements that a step sends of a tensor or a segment.

    A density is elements sent / elements, in (0, 1]; a budget of n elements at density d is ``max(1, ceil(d * n))``.
    """

    target: float  # the compressor's own density
    patterns: tuple[tuple[re.Pattern[str], float], ...] = ()  # by full name; the first match counts
    by_importance: bool = False  # budgets go by the energy of gradients, around the target, once that is known
    warmup: Schedule | None = None  # other densities in the first steps

    def of_parameter(self, name: str) -> float | None:
        """Return the density of a parameter where densities are given by pattern; None: the target's."""
        if not self.patterns:
            return None
        return next((density for pattern, density in self.patterns if pattern.fullmatch(name)), self.target)

    def at(self, step: int, own: float | None = None) -> float:
        """Return the density in a step. ``own``: that of a tensor, as :meth:`of_parameter` has it."""
        target = self.target if own is None else own
        return target if self.warmup is None else self.warmup(step, target)

    def budget(self, numel: int, step: int, own: float | None = None) -> int:
        """Return how many of ``numel`` elements a step sends."""
        return sparsifiers.budget(self.at(step, own), numel)

    def budget_by_importance(self, share: int, numel: int, step: int) -> int:
        """Return how many of a tensor's ``numel`` elements a step sends if it is ``share`` at the target density."""
        elements = share * (self.at(step) / self.target)  # a warm-up is for all alike
        return min(max(1, math.ceil(elements - 1e-6)), numel)

    @property
    def varies(self) -> bool:
        """Return whether the same tensor may have other budgets in other steps."""
        return self.warmup is not None

    @property
    def least(self) -> float:
        """Return the lowest density that is asked for of any parameter."""
        return min([density for _, density in self.patterns] or [self.target])

    def facts(self) -> Iterable[Fact]:
        """Return the facts that must be the same on every rank; patterns are compared tensor by tensor."""
        return [
            ("density", str(self.target)),
            ("density by importance", str(self.by_importance)),
            ("warmup", self.warmup.text if self.warmup is not None else "None"),
        ]


# ``density="importance"``: the energy of gradients, and how many elements each tensor may send by it.

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

    The share of a tensor grows with its energy per element, see :func:`merging.dense_cutoff.loads` (AGTF).
    """
    sparse = [slot for slot in slots if slot.tensor_class.sparse]
    mean = np.where(np.isfinite(energies), energies, 0.0).mean(axis=0)
    numel, energy = [slot.numel for slot in sparse], [mean[slot.index] for slot in sparse]
    counts = loads(numel, energy, density, least=density / SPREAD, most=min(1.0, density * SPREAD))
    budgets = [0] * len(slots)
    for slot, count in zip(sparse, counts.tolist(), strict=True):
        budgets[slot.index] = max(1, count)
    return tuple(budgets)


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
