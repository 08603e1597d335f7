# SPDX-License-Identifier: Apache-2.0
"""Decide how many elements of each tensor a step sends, by ``density=`` and ``warmup=``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import sparsifiers
from agmerge.backends.handshake import Fact

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
