# SPDX-License-Identifier: Apache-2.0
"""Check ``merging=`` and ``groups=``: a planner, a plan, or groups of the script's own; and what goes with these."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from typing import Any

import torch

import merging
from agmerge.exchanges.send_mode import AHEAD, OWN, send_mode, why_labels_are_wrong, with_send_mode
from agmerge.exchanges.splitting import why_parts_impossible
from agmerge.options import published
from agmerge.options.arguments import is_whole
from agmerge.step.config import AUTO, FASTEST, Config
from agmerge.step.groups import Groups

NO_GROUPS = "groups should be a non-negative integer or a list of list of torch.Tensor."


def planner_or_plan(given: Any, sparsify: str, exchange: str) -> tuple[merging.Planner | None, merging.Plan | None]:
    """Return the planner that ``merging=`` names, or else the plan. Raises ``ValueError`` for one that cannot be used.

    Args:
        given: a planner or its name, a plan or the path of a saved one.
        sparsify: "ahead" labels the merge buffers of a plan.
        exchange: must leave the choice where a plan has dense merge buffers.
    """
    if isinstance(given, str) and not given.endswith(".json"):
        given = published.planner(given)
    if isinstance(given, merging.Planner):
        return given, None
    if isinstance(given, os.PathLike) or (isinstance(given, str) and given.endswith(".json")):
        given = merging.Plan.load(given)
    if isinstance(given, merging.Plan):
        if problem := why_labels_are_wrong(given):
            raise ValueError(f"merging: {problem}")
        if any(given.dense) and exchange not in (AUTO, FASTEST):
            raise ValueError(
                "merging: this plan has uncompressed merge buffers, which require exchange='auto', got "
                f"exchange={exchange!r}. Pass exchange={AUTO!r}."
            )
        if sparsify == "behind" and send_mode(given).ahead:
            raise ValueError(
                "sparsify='behind' is not supported with this plan, which was made for sparsify='ahead'. Remove one "
                "of them."
            )
        if sparsify == AHEAD:
            given = with_send_mode(given, ahead=True)
        if problem := why_parts_impossible(given):
            raise ValueError(f"merging: {problem}")
        return None, given
    names = ", ".join(merging.names())
    raise TypeError(f"merging={given!r}: expected a planner's name ({names}), a planner, or a saved plan")


def check_send_mode(config: Config) -> None:
    """Raise ``ValueError`` for a plan with a value codec or exchange that these options do not leave to a plan."""
    if config.merging.plan is None:
        return
    mode = send_mode(config.merging.plan)
    if mode.codec not in (OWN, config.compression.wire, *config.wires):
        raise ValueError(
            f"merging: this plan sends values as {mode.codec} with error feedback, but the options differ. Pass "
            f"wire={mode.codec!r}, or use another plan."
        )
    if mode.quantiser not in (OWN, config.compression.compressor.name, *config.quantisers):
        raise ValueError(
            f"merging: this plan sends in {mode.quantiser!r}, but compression is {config.compression.compressor!r}. "
            f"Pass compression={mode.quantiser!r} or 'auto', or use another plan."
        )
    if mode.exchange not in (OWN, config.merging.exchange, *config.exchanges):
        raise ValueError(
            f"merging: this plan uses exchange={mode.exchange!r}, but exchange={config.merging.exchange!r} is set. "
            f"Pass exchange={FASTEST!r} or {mode.exchange!r}, or use another plan."
        )


def check_dear(config: Config) -> None:
    """Raise unless ``merging="dear"`` has the model that it needs, and no other merging has one.

    ``TypeError`` for a model that is no module, ``ValueError`` for options that do not go with DeAR.
    """
    model, dear = config.sync.model, "dear" in getattr(config.merging.planner, "modes", ())
    if model is not None and not isinstance(model, torch.nn.Module):
        raise TypeError(f"model={model!r}: expected the torch.nn.Module whose forward uses the parameters")
    if not dear and model is not None:
        raise ValueError("model= is supported with merging='dear' only. Remove it.")
    if dear and model is None:
        raise ValueError(
            "merging='dear' requires model=, because it applies updates in the next forward pass. Pass the module "
            "that you call."
        )
    if dear and config.guards.scaled:
        raise ValueError(
            "merging='dear' is not supported with scaler=, because scaler.step() cannot see updates in the next "
            "forward pass. Train in bfloat16 without scaler=, or use another merging."
        )
    if dear and config.compression.compressor.compresses:
        how = (
            "{} sends selected values by all-gather"
            if config.compression.compressor.selects
            else "{} sends low-rank factors"
        )
        raise ValueError(
            f"merging='dear' requires an all-reduce, but {how.format(repr(config.compression.compressor))}. Pass "
            "compression='none', 'fp16' or 'bf16', or use another merging."
        )


def parse_groups(groups: Any, num_groups: Any) -> Groups | None:
    """Return the groups that both arguments ask for as Horovod means them, None for none.

    Raises ``ValueError``, with Horovod's texts, as Horovod does. Warns of ``num_groups``, its old name.
    """
    if not is_whole(num_groups, 0):
        raise ValueError(f"num_groups={num_groups!r}: {NO_GROUPS}")
    if num_groups:
        warnings.warn("AGM307: Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, stacklevel=8)
        groups = num_groups if groups is None else groups
    if groups is None:
        return None
    if is_whole(groups, 1):
        return Groups(number=groups)
    if not isinstance(groups, (list, tuple)):
        raise ValueError(f"{NO_GROUPS} Got {groups!r}.")
    listed = []
    for group in groups:
        if isinstance(group, torch.Tensor) or not isinstance(group, Iterable):
            raise ValueError(f"{NO_GROUPS} One of the groups is a {type(group).__name__}, not a list.")
        listed.append(tuple(group))
    seen: set[torch.Tensor] = set()
    for tensor in (tensor for group in listed for tensor in group):
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"groups must consist of torch.Tensor. One of them is {tensor!r}.")
        if tensor in seen:
            raise ValueError(
                f"A parameter can only appear once in groups. A parameter of shape {list(tensor.shape)} appears twice."
            )
        seen.add(tensor)
    return Groups(listed=tuple(listed))
