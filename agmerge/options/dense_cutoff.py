"""``dense="partial"``: which tensors go dense beside the exempt ones, so that the volume stays.

The cut only ever falls. It starts at the largest feasible one, when no tensor has a residual; a smaller one makes dense
tensors sparse. The other way, a residual would be left without a lane that sends it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import sparsifiers
from agmerge.tensors.parameters import ParameterInfo
from merging import dense_cutoff
from sparsifiers import Kind

NAME = "partial"
Exempt = Callable[[str, torch.Tensor], bool]  # what goes dense whatever the cut
CROWDED = (
    "dense='partial': the parameters that are always sent whole (fewer than two dimensions, or than 1024 elements) are "
    "more than half of what density={density:g} allows to send, so no others can go dense within it. It is as with "
    "dense=None; a larger density leaves room"
)


@dataclass(frozen=True)
class DenseCutoff:
    """``most``: in elements, the cut in use, or None before there was one. ``settled``: it has been chosen by times."""

    most: int | None = None
    settled: bool = False

    def __str__(self) -> str:
        return "by rule" if self.most is None else f"up to {self.most} elements{', settled' * self.settled}"


def parse_dense_cutoff(
    dense: Any, compressor: sparsifiers.Compressor, compression: Any, density: Any, warmup: Any
) -> DenseCutoff | None:
    """The start of ``dense="partial"``, None for other rules; ``ValueError`` for what has no meaning with it."""
    if not (isinstance(dense, str) and dense == NAME):
        return None
    if not compressor.selects:
        raise ValueError(
            f"dense='partial' and compression={compression!r}: everything is sent whole, there is nothing to choose; "
            "leave dense out, or compress with a sparsifier"
        )
    if isinstance(density, (dict, str)):
        raise ValueError(
            f"dense='partial' and density={density!r}: both say what each parameter sends; give one number as density"
        )
    if callable(warmup):
        raise ValueError(
            "dense='partial' and warmup: a callable gives one density and knows nothing of what goes dense; "
            "give 'dgc' or a number of steps"
        )
    return DenseCutoff()


def cut_of(members: Sequence[ParameterInfo], rule: DenseCutoff, density: float, exempt: Exempt) -> int | None:
    """The largest feasible cut for these members that is not above the one so far; None where none is feasible."""
    cuts = dense_cutoff.feasible(*_figures(members, exempt), density)
    return max((cut for cut in cuts if rule.most is None or cut <= rule.most), default=None)


def place(members: Sequence[ParameterInfo], rule: DenseCutoff, density: float, exempt: Exempt) -> list[ParameterInfo]:
    """The members with their lanes, and the density of those that are still selected from."""
    cut = cut_of(members, rule, density, exempt)
    sizes, always = _figures(members, exempt)
    rest = None if cut is None else dense_cutoff.remaining(sizes, always, cut, density)
    dense = [whole or size <= (cut or 0) for size, whole in zip(sizes, always, strict=True)]
    return [
        replace(member, kind=Kind.DENSE if whole else Kind.SPARSE, density=None if whole else rest)
        for member, whole in zip(members, dense, strict=True)
    ]


def with_cutoff_for(
    members: Sequence[ParameterInfo], rule: DenseCutoff, density: float, exempt: Exempt, *, warns: bool
) -> DenseCutoff:
    """Return the rule from now on, for these members. ``warns``: this rank does, where no cutoff is feasible."""
    cut = cut_of(members, rule, density, exempt)
    if cut is None and rule.most != 0 and warns:
        warnings.warn(CROWDED.format(density=density), stacklevel=2)
    return replace(rule, most=cut or 0)


def resumed(rule: DenseCutoff | None, section: Mapping[str, Any]) -> DenseCutoff | None:
    """The rule of a checkpoint. One without a cut may have residuals of any tensor, so that no more may go dense."""
    if rule is None or not section["steps"]:
        return rule
    return DenseCutoff(*(section.get("partial") or (0, True)))


def _figures(members: Sequence[ParameterInfo], exempt: Exempt) -> tuple[list[int], list[bool]]:
    sizes = [member.parameter.numel() for member in members]
    return sizes, [exempt(member.name, member.parameter) for member in members]
