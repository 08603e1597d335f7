# SPDX-License-Identifier: Apache-2.0
"""Distribute the sections of all ranks over another number of ranks, so that no update is lost.

Unsent gradients are the sum of residual * weight over ranks, with the weight that updates give each rank (see
:func:`agmerge.step.agreed_state.weight_factor`), and that sum stays the same. So the old rank r's residual goes to the
new rank r mod W', and where updates are averages all of them are multiplied by W' / W: the sum of W'/W * residual / W'
over the new ranks is the sum of residual / W over the old ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from agmerge.ops import ReduceOp
from agmerge.step.agreed_state import weight_factor
from agmerge.step.config import APPLY
from agmerge.updates.shared_parameters import place

Section = dict[str, Any]  # a rank's section of a state_dict()


def redistribute(sections: Sequence[Section], rank: int, size: int, op: ReduceOp) -> Section:
    """Return the section of ``rank`` of ``size`` workers, made from those of all ranks of another number.

    Plan, steps, use, budgets and shared parameters are equal on all ranks. The state of sparsifiers is dropped, and,
    with a warning, so are gradients of an unfinished accumulation. ``op``: whether updates are averages or sums.
    """
    before, factor = len(sections), weight_factor(op, len(sections), size)
    dealt = [section for r, section in enumerate(sections) if r % size == rank]
    part: Section = {**sections[0], "rank": rank, "size": size, "compressor": None, "window": {}}
    for kind in ("residuals", "momenta"):  # each rank's own
        part[kind] = _sums([section[kind] for section in dealt], factor)
    if sections[0]["updates"]:
        moved = [displacements(section["updates"], section["residuals"]) for section in dealt]
        part["updates"] = displaced(sections[0]["updates"], _sums(moved, factor))
        part["inner"] = sections[rank % before].get("inner")
    if any(section["window"] for section in sections):
        warnings.warn(
            f"AGM402: The checkpoint was saved by {before} ranks between two backward passes of one step. With {size} "
            "ranks, the gradients of that step are dropped. Save after step().",
            stacklevel=4,
        )
    return part


def displacements(updates: Mapping[str, Any], residuals: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the differences between a rank's expected and own parameters, by name; ``residuals`` are not included.

    The debt of the rank to all ranks counts as its own. ``updates``: a result of
    :meth:`agmerge.updates.local_replica.LocalReplica.saved`.
    """
    shown = residuals if updates["carry"] == APPLY else {}
    moved = {
        name: place(updates["base"][name], shown.get(name), own.dtype) - own for name, own in updates["own"].items()
    }
    for name, owed in updates.get("owed", {}).items():  # the mean over workers divides by their number
        moved[name] = moved[name].add(owed, alpha=float(updates["workers"]))
    return {**updates["displacements"], **moved}


def displaced(updates: Mapping[str, Any], moved: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return ``updates`` with these displacements in place of a rank's own parameters, and with nothing under way."""
    return {**updates, "own": {}, "owed": {}, "under_way": False, "displacements": dict(moved)}


def _sums(parts: Sequence[Mapping[str, torch.Tensor]], factor: float) -> dict[str, torch.Tensor]:
    """Return, by name, the sums over sections times ``factor``."""
    sums: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            sums[name] = sums[name] + tensor if name in sums else tensor
    return {name: tensor * factor for name, tensor in sums.items()}
