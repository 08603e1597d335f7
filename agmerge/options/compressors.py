# SPDX-License-Identifier: Apache-2.0
"""Turn ``compression=``, ``memory=`` and ``density=`` into objects."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

import sparsifiers
from agmerge.errors import warn
from agmerge.ops import Compression
from agmerge.options import published
from agmerge.runtime import horovod_names, workers
from agmerge.step.config import AUTO
from sparsifiers import catalogue
from sparsifiers.name_patterns import compiled

DENSE = (
    "AGM704: compression=Compression.none sends uncompressed gradients, as in Horovod. To compress, remove it or set "
    "a compressor such as compression='topk'. Pass compression='none' to silence this warning."
)
CASTS = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}


class Cast(sparsifiers.Compressor):
    """Compressor that sends every element, in the gradient's own dtype ("none") or cast to 16 bits ("fp16", "bf16")."""

    kind = sparsifiers.Kind.DENSE

    def __init__(self, name: str) -> None:
        self.name = name
        self.dtype = CASTS[name]  # None: nothing is cast, and nothing lost
        self.memory = "none" if self.dtype is None else "residual"


def cast_name(compression: Any) -> str | None:
    """Return ``"none"``, ``"fp16"`` or ``"bf16"`` for a cast, in any form that is accepted; None for anything else."""
    if isinstance(compression, Compression):
        return compression.value
    own = published.cast(compression) if isinstance(compression, str) else None
    name = horovod_names.horovod_compression(compression) or own
    return name if name in CASTS else None


def compressor_of(compression: Any, density: Any, rank: Any = None) -> sparsifiers.Compressor:
    """Return the compressor that is meant. Raises ``ValueError`` or ``TypeError``.

    Args:
        compression: a name, an object that is a compressor, or {pattern: one of these}.
        density: the one number that a sparsifier given by name gets; one that is an object has its own.
        rank: likewise, of a low-rank compressor: a number, {pattern: number}, or None, its own.
    """
    if rank is not None:
        sparsifiers.low_rank("powersgd", rank)  # checked also where it is not needed
    if isinstance(compression, Mapping):
        return _by_name(compression, density, rank)
    try:
        sparsifiers.budget(density, 1)  # checked also where it is not needed
    except ValueError as error:
        raise ValueError(f"density={density!r}: {error}") from None
    cast = cast_name(compression)
    if cast == "none" and not isinstance(compression, str) and workers.is_initialized():
        warn(DENSE, workers.rank())  # the object of a script that was Horovod's
    if cast is not None:
        return Cast(cast)
    if isinstance(compression, sparsifiers.Compressor):
        return compression
    if not isinstance(compression, str):
        raise TypeError(_why_no_compressor(compression))
    kinds = (catalogue.is_sparsifier, catalogue.is_low_rank, catalogue.is_quantiser)
    if not any(is_of(compression) for is_of in kinds):
        raise ValueError(unknown("compression", compression))
    return named(compression, density, rank)


def named(name: str, density: Any, rank: Any, **options: Any) -> sparsifiers.Compressor:
    """Return the compressor of this name, with options of its own. ``TypeError`` for one that it does not have."""
    if sparsifiers.is_low_rank(name):
        return sparsifiers.low_rank(name, **({} if rank is None else {"rank": rank}), **options)
    if sparsifiers.is_quantiser(name):
        return sparsifiers.quantiser(name, **options)
    return sparsifiers.get(name, density=density, **options)


def _by_name(parts: Mapping[Any, Any], density: Any, rank: Any) -> sparsifiers.Compressor:
    """Return the compressor of {pattern: compressor}. Raises as :func:`compressor_of` does."""
    if not parts:
        raise ValueError(
            "compression={}: expected a compressor's name, or at least one pattern that matches full parameter names"
        )
    made = [(pattern, compressor_of(part, density, rank)) for pattern, part in parts.items()]
    for pattern, part in made:
        if part.dtype is not None:
            raise ValueError(
                f"compression={{{pattern!r}: {part.name!r}}}: casts cannot be used in a pattern. Use 'none' to leave "
                "these parameters uncompressed, or wire= to send the selected values in 16 bits."
            )
    return sparsifiers.ByName(made)


def _why_no_compressor(given: Any) -> str:
    """Return why an object that is neither a name nor a compressor cannot be taken for one."""
    if hasattr(given, "compress") and hasattr(given, "decompress"):
        return (
            f"compression={given!r}: of Horovod's compressors, only none and fp16 are supported. Pass your own "
            "compressor as a sparsifiers.Sparsifier."
        )
    return (
        f"compression={given!r}: expected a name ({_names()}), {{pattern: name}}, a sparsifiers.Compressor, or "
        "agmerge.Compression.none | .fp16 | .bf16"
    )


def unknown(argument: str, name: str) -> str:
    """Return the error about an unknown compressor's name, with the known ones and the one that may be meant."""
    return f"{argument}={name!r} is unknown. Choose from: {_names()}{published.hint(published.COMPRESSION, name)}"


def _names() -> str:
    return f"{', '.join(sparsifiers.names())}, {_others()}"


def _others() -> str:
    """Return the names of compressors that are no sparsifiers."""
    return ", ".join((AUTO, *sparsifiers.quantisers(), *sparsifiers.low_rank_names(), *CASTS))


def memory_for(memory: Any, compressor: sparsifiers.Compressor) -> sparsifiers.Memory:
    """Return the memory that is asked for, or the compressor's own (``memory`` None).

    Raises ``ValueError`` or ``TypeError`` for one that does not fit.
    """
    memory = compressor.memory if memory is None else memory
    given = sparsifiers.memory(memory) if isinstance(memory, str) else memory
    if not isinstance(given, sparsifiers.Memory):
        raise TypeError(f"memory={memory!r}: expected a name or a sparsifiers.Memory")
    if given.has_momentum and compressor.kinds != {sparsifiers.Kind.SPARSE}:
        text = f"memory={memory!r} applies momentum to the values that a sparsifier selects. Use it with a sparsifier"
        if compressor.selects:
            text += " only: next to low-rank factors, in compression={pattern: name}, pass memory='residual'"
        raise ValueError(text)
    if not compressor.compresses and compressor.dtype is None and given.has_residual:
        raise ValueError(
            f"memory={memory!r} has no effect with compression='none', which leaves no residual. Remove memory=."
        )
    return given


def densities_of(density: Any) -> tuple[tuple[re.Pattern[str], float], ...]:
    """Return densities by pattern for full names (regular expressions), in the order given; empty for a number.

    Raises ``ValueError`` for an empty dict, a pattern that is none, or a density outside (0, 1].
    """
    if not isinstance(density, dict):
        return ()
    if not density:
        raise ValueError("density={}: expected a number, or at least one pattern that matches full parameter names")
    patterns = []
    for pattern, value in density.items():
        try:
            sparsifiers.budget(value, 1)
            patterns.append((compiled(pattern), float(value)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"density={{{pattern!r}: {value!r}}}: {error}") from None
    return tuple(patterns)
