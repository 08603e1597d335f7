# SPDX-License-Identifier: Apache-2.0
"""Choose for ``dense="partial"`` which tensors go dense beside the exempt ones, so that the volume stays.

The cut only ever falls. It starts at the largest feasible one, when no tensor has a residual; a smaller one makes dense
tensors sparse. If it rose, a residual would be left without messages that send it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from agmerge.tensors.parameters import ParameterInfo
from merging import dense_cutoff
from sparsifiers import Kind

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
