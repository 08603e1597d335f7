# SPDX-License-Identifier: Apache-2.0
"""Compressors and memories by name. A new one is a file of its own, and an import and a line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparsifiers.base import Sparsifier
from sparsifiers.dgc import DGC
from sparsifiers.dgc_memory import DGCMemory
from sparsifiers.low_rank import ACPSGD, RANK, LowRank, PowerSGD, Ranks
from sparsifiers.memories import Memory, NoMemory, Residual, ResidualGTopK
from sparsifiers.papers.adtopk import AdTopK, AdTopKFill, AdTopKRow
from sparsifiers.papers.gaussiank import GaussianK
from sparsifiers.papers.redsync import RedSync, RedSyncTrim
from sparsifiers.papers.sidco import SIDCoE, SIDCoGamma, SIDCoGP
from sparsifiers.papers.threshold import Threshold
from sparsifiers.published import (
    LOW_RANK,
    NEAREST_LOW_RANK,
    NEAREST_QUANTISER,
    NEAREST_SPARSIFIER,
    QUANTISERS,
    SPARSIFIERS,
)
from sparsifiers.quantising.base import Quantizer
from sparsifiers.quantising.eden import Eden
from sparsifiers.quantising.float8 import Float8
from sparsifiers.quantising.linear import Int4, Int8
from sparsifiers.quantising.onebit import OneBit
from sparsifiers.quantising.stochastic import QSGD, TernGrad
from sparsifiers.randomk import RandomK
from sparsifiers.registry import Registry
from sparsifiers.topk import TopK

_sparsifiers: Registry[Sparsifier] = Registry("sparsifier", Sparsifier, SPARSIFIERS, NEAREST_SPARSIFIER)
_sparsifiers.register("topk", TopK)
_sparsifiers.register("randomk", RandomK)
_sparsifiers.register("threshold", Threshold)
_sparsifiers.register("dgc", DGC)
_sparsifiers.register("gaussiank", GaussianK)
_sparsifiers.register("redsync", RedSync)
_sparsifiers.register("redsync-trim", RedSyncTrim)
_sparsifiers.register("sidco-e", SIDCoE)
_sparsifiers.register("sidco-gp", SIDCoGP)
_sparsifiers.register("sidco-gamma", SIDCoGamma)
_sparsifiers.register("adtopk", AdTopK)
_sparsifiers.register("adtopk-row", AdTopKRow)
_sparsifiers.register("adtopk-fill", AdTopKFill)

_low_rank: Registry[LowRank] = Registry("low-rank compressor", LowRank, LOW_RANK, NEAREST_LOW_RANK)
_low_rank.register("powersgd", PowerSGD)
_low_rank.register("acpsgd", ACPSGD)

_quantisers: Registry[Quantizer] = Registry("quantizer", Quantizer, QUANTISERS, NEAREST_QUANTISER)
_quantisers.register("eden-1", lambda: Eden(1))
_quantisers.register("eden-2", lambda: Eden(2))
_quantisers.register("eden-3", lambda: Eden(3))
_quantisers.register("eden-4", lambda: Eden(4))
_quantisers.register("int8", Int8)
_quantisers.register("int4", Int4)
_quantisers.register("fp8", Float8)
_quantisers.register("qsgd", QSGD)
_quantisers.register("terngrad", TernGrad)
_quantisers.register("onebit", OneBit)

_memories: Registry[Memory] = Registry("memory", Memory)
_memories.register("none", NoMemory)
_memories.register("residual", Residual)
_memories.register("dgc", DGCMemory)
_memories.register("residualgtopk", ResidualGTopK)


def names() -> tuple[str, ...]:
    """Return the canonical names of the sparsifiers; those that a script has registered come last."""
    return _sparsifiers.names()


def get(name: str, density: float = 0.01, **options: object) -> Sparsifier:
    """Make a sparsifier by canonical name or alias, in any case, with or without hyphens and underscores.

    density: elements sent / elements, in (0, 1]. options: hyper-parameters of that sparsifier, see its class.
    ValueError for an unknown name or a density outside (0, 1]; TypeError for an option it does not have.
    """
    if name in _quantisers and name not in _sparsifiers:
        raise ValueError(f"{name!r} is a quantizer, no sparsifier; make it by sparsifiers.quantizer({name!r})")
    if isinstance(name, str) and name not in _sparsifiers and (near := _quantisers.published(name)):
        raise ValueError(f"{name!r} is no sparsifier; what comes nearest is sparsifiers.quantizer({near!r})")
    return _sparsifiers.create(name, density, **options)


def is_sparsifier(name: str) -> bool:
    """Return whether this is the name of a sparsifier, or an alias, in any spelling."""
    return name in _sparsifiers


def register(name: str, factory: Callable[..., Sparsifier]) -> None:
    """Register a sparsifier, made by `factory(density, **options)`. ValueError for a taken name."""
    _refuse_taken(name, _low_rank, _quantisers)
    _sparsifiers.register(name, factory)


def low_rank_names() -> tuple[str, ...]:
    """Return the canonical names of the low-rank compressors."""
    return _low_rank.names()


def is_low_rank(name: str) -> bool:
    """Return whether this is the name of a low-rank compressor, or an alias, in any spelling."""
    return name in _low_rank


def low_rank(name: str, rank: Ranks = RANK, **options: object) -> LowRank:
    """Make a low-rank compressor by canonical name or alias, in any case, with or without hyphens and underscores.

    rank: columns of each factor, or {pattern: rank}, where patterns are regular expressions that must match the full
    name. options: `seed`. ValueError for an unknown name or a rank that is no whole number above 0; TypeError for an
    option that it does not have.
    """
    return _low_rank.create(name, rank, **options)


def quantizers() -> tuple[str, ...]:
    """Return the canonical names of the quantizers; those that a script has registered come last."""
    return _quantisers.names()


def is_quantizer(name: str) -> bool:
    """Return whether this is the name of a quantizer, or an alias, in any spelling."""
    return name in _quantisers


def quantizer(name: str, **options: object) -> Quantizer:
    """Make a quantizer by canonical name or alias, in any case, with or without hyphens and underscores.

    options: hyper-parameters of that quantizer, see its class. ValueError for an unknown name, a value that it cannot
    have, or a type that this torch lacks; TypeError for an option that it does not have.
    """
    return _quantisers.create(name, **options)


def register_quantizer(name: str, factory: Callable[..., Quantizer]) -> None:
    """Register a quantizer, made by `factory(**options)`. ValueError for a taken name."""
    _refuse_taken(name, _sparsifiers, _low_rank)
    _quantisers.register(name, factory)


def canonical(name: str) -> str | None:
    """Return the canonical name of a compressor of any kind, or of the nearest to a published name; None: none.

    A name that is taken comes before one that is only near.
    """
    kinds: tuple[Registry[Any], ...] = (_sparsifiers, _low_rank, _quantisers)
    known = next(filter(None, (kind.canonical(name) for kind in kinds)), None)
    return known or next(filter(None, (kind.published(name) for kind in kinds)), None)


def memory(name: str, **options: object) -> Memory:
    """Make a memory by name. ValueError for an unknown name; TypeError for an option it does not have."""
    return _memories.create(name, **options)


def _refuse_taken(name: object, *others: Registry[Any]) -> None:
    """Raise ValueError if compressors of another kind have this name: `compression=name` means one of all kinds."""
    if any(name in other for other in others):
        raise ValueError(f"the name {name!r} is taken by a compressor of another kind; choose another one")


# The old spelling of these names: scripts have it.
quantiser, quantisers = quantizer, quantizers
is_quantiser, register_quantiser = is_quantizer, register_quantizer
