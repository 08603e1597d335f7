# SPDX-License-Identifier: Apache-2.0
"""Treatment of each parameter by a config: dense, selected from, factorised or quantised; and refusals, by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from agmerge.step import density_policy
from agmerge.step.config import TWO_LEVEL, Config
from agmerge.tensors.nonfinite import SKIP
from agmerge.tensors.parameters import ParameterInfo, is_dtensor, why_not_exchangeable
from sparsifiers import Kind
from sparsifiers.name_patterns import advice


def assign_classes(config: Config, members: Iterable[ParameterInfo]) -> list[ParameterInfo]:
    """Return the parameters, each with its treatment. A rule of the script's own is asked once for each of them."""
    compression, members = config.compression, list(members)
    if compression.partial is not None:
        target, dense = compression.density.target, compression.dense
        return density_policy.assign_classes(members, compression.partial, target, dense)
    placed = []
    for member in members:
        kind = _kind_of(config, member)
        density = compression.density.of_parameter(member.name) if kind is Kind.SPARSE else None
        placed.append(replace(member, kind=kind, density=density))
    return placed


def _kind_of(config: Config, member: ParameterInfo) -> Kind:
    """Return how a parameter's gradient is sent."""
    if member.is_figure:
        return Kind.DENSE
    compressor = config.compression.compressor.of_tensor(member.name)
    exempt = config.compression.dense(member.name, member.local)
    compressed = compressor.is_for(member.dtype) and compressor.shrinks(member.name, member.shape)
    return compressor.kind if compressed and not exempt else Kind.DENSE


def with_cutoff_for(config: Config, members: Sequence[ParameterInfo], *, warns: bool) -> Config:
    """Return ``config`` with the cutoff of dense="partial" for these parameters. ``warns``: this rank may warn."""
    compression = config.compression
    if compression.partial is None:
        return config
    target, dense = compression.density.target, compression.dense
    return config.changed(
        partial=density_policy.with_cutoff_for(members, compression.partial, target, dense, warns=warns)
    )


def check_parameter(config: Config, member: ParameterInfo) -> None:
    """Raise ``ValueError`` for a parameter with a gradient that cannot be sent, or not by this compression."""
    problem = why_not_exchangeable(member.parameter, member.name)
    if not problem and is_dtensor(member.parameter):
        problem = _why_not_sharded(config, member.name)
    if problem:
        raise ValueError(problem)
    casts = config.compression.compressor.dtype is not None
    if member.dtype.is_complex and (casts or member.kind is not Kind.DENSE):
        raise ValueError(
            f"parameter {member.name!r} is {member.dtype}: sparsifiers and casts support real numbers only. Use "
            "compression='none', leave it uncompressed (dense=), or store it as torch.view_as_real()."
        )


def _why_not_sharded(config: Config, name: str) -> str:
    """Return why these options do not go with a parameter of which a rank holds a shard; "" if they do."""
    if config.sync.model is not None:
        return (
            f"merging='dear' is not supported with parameter {name!r}, a DTensor, because FSDP gathers parameters "
            "before DeAR would update them. Use another merging."
        )
    if config.merging.exchange == TWO_LEVEL:
        return (
            f"exchange='two-level' is not supported with parameter {name!r}, a DTensor: ranks of a node already share "
            "it by shards, and process_set= is the level between nodes. Pass exchange='sparse' or 'auto'."
        )
    if config.guards.nonfinite == SKIP and not config.guards.scaled:
        return (
            f"nonfinite='skip' is not supported with parameter {name!r}, a DTensor, because only the rank with the "
            "affected shard would skip the step. Pass scaler=, which checks all shards, or nonfinite='raise'."
        )
    return ""


def check_patterns(config: Config, names: Iterable[str]) -> None:
    """Raise ``ValueError`` for a pattern that matches none of ``names``: a slip is not ignored."""
    known = list(names)
    given: dict[str, Sequence[re.Pattern[str]]] = {
        "dense": config.compression.patterns,
        "density": [pattern for pattern, _ in config.compression.density.patterns],
        **config.compression.compressor.name_patterns(),
    }
    for what, pattern in ((what, pattern) for what, patterns in given.items() for pattern in patterns):
        if not any(pattern.fullmatch(name) for name in known):
            raise ValueError(
                f"AGM301: {what}: the pattern {pattern.pattern!r} matches no parameter. "
                f"{advice(pattern.pattern, known)}. Parameters: {', '.join(known)}"
            )
