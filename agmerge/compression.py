"""What ``compression=``, ``memory=`` and ``density=`` say, as objects."""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch

import sparsifiers
from agmerge import runtime
from agmerge.backends import horovod
from agmerge.ops import Compression

DENSITY = 0.01  # the default
DENSE = (
    "compression=Compression.none sends every gradient whole, as in Horovod. To send less leave it out, or name a "
    "compressor (compression='topk'); compression='none' is the same as now without this warning."
)
CASTS = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}


def compressor_of(compression: Any, density: Any) -> tuple[sparsifiers.Sparsifier | None, torch.dtype | None]:
    """The sparsifier, or None and the dtype of a cast (None: none). ``ValueError``, ``TypeError``: it is neither."""
    name = compression.value if isinstance(compression, Compression) else horovod.compression(compression)
    if name == "none" and runtime.is_initialized() and runtime.rank() == 0:  # the object of a script that was Horovod's
        warnings.warn(DENSE, UserWarning, stacklevel=5)
    compression = name or compression
    try:
        sparsifiers.budget(density, 1)  # checked also where it is not needed
    except ValueError as error:
        raise ValueError(f"density={density!r}: {error}") from None
    if isinstance(compression, str) and compression in CASTS:
        # density and exchange stay as they are in a script that swaps its compressor by name: they are about
        # the sparse lane, which is then empty.
        return None, CASTS[compression]
    if isinstance(compression, sparsifiers.Sparsifier):
        if density not in (DENSITY, compression.density):
            raise ValueError(
                f"density={density!r} and compression={compression!r} disagree: give the density to the compressor only"
            )
        return compression, None
    if not isinstance(compression, str):
        if hasattr(compression, "compress") and hasattr(compression, "decompress"):
            raise TypeError(
                f"compression={compression!r}: of Horovod's compressors only none and fp16 are taken; one of your own "
                "is a sparsifiers.Sparsifier here"
            )
        raise TypeError(
            f"compression={compression!r}: give a name ({_names()}), a sparsifiers.Sparsifier, "
            "or agmerge.Compression.none | .fp16 | .bf16"
        )
    try:
        return sparsifiers.get(compression, density=density), None
    except ValueError as error:
        text = f"compression={compression!r}, density={density!r}: {error}; besides these: {', '.join(CASTS)}"
        raise ValueError(text) from None


def _names() -> str:
    return ", ".join((*sparsifiers.names(), *CASTS))


def memory_for(
    memory: Any, sparsifier: sparsifiers.Sparsifier | None, cast: torch.dtype | None
) -> sparsifiers.Memory:
    """The memory that is asked for, or the compressor's own; ``ValueError``, ``TypeError`` if it does not fit."""
    lossless = sparsifier is None and cast is None
    if memory is None:
        return sparsifiers.memory("none" if lossless else sparsifier.memory if sparsifier else "residual")
    chosen = sparsifiers.memory(memory) if isinstance(memory, str) else memory
    if not isinstance(chosen, sparsifiers.Memory):
        raise TypeError(f"memory={memory!r}: give a name or a sparsifiers.Memory")
    if chosen.corrects and sparsifier is None:
        raise ValueError(f"memory={memory!r} has momentum for what a sparsifier selects; give it to a sparsifier")
    if lossless and chosen.keeps:
        raise ValueError(f"memory={memory!r} keeps what a compressor drops, and compression='none' drops nothing")
    return chosen


def densities_of(density: Any) -> tuple[tuple[re.Pattern[str], float], ...]:
    """Densities by pattern, in the order given; empty for a number."""
    if not isinstance(density, dict):
        return ()
    if not density:
        raise ValueError("density={}: give at least one pattern for whole names, or a number")
    found = []
    for pattern, value in density.items():
        try:
            sparsifiers.budget(value, 1)
            found.append((re.compile(pattern), float(value)))
        except (TypeError, ValueError, re.error) as error:
            raise ValueError(f"density={{{pattern!r}: {value!r}}}: {error}") from None
    return tuple(found)
