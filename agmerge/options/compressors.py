"""Turn ``compression=``, ``memory=`` and ``density=`` into objects."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import torch

import sparsifiers
from agmerge.ops import Compression
from agmerge.options import momentum
from agmerge.options.density_policy import DENSITY
from agmerge.options.updates import GRADIENTS, UPDATES
from agmerge.runtime import horovod_names, workers
from sparsifiers.registry import spelling

AUTO = "auto"
DENSE = (
    "compression=Compression.none sends every gradient whole, as in Horovod. To send less leave it out, or name a "
    "compressor (compression='topk'); compression='none' is the same as now without this warning."
)
CASTS = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}
_MEANT = {  # by others' names
    **dict.fromkeys(("fp32", "float32", "float", "dense", "allreduce", "off"), "none"),
    **dict.fromkeys(("float16", "half"), "fp16"),
    "bfloat16": "bf16",
}

# What is about selection alone: the value that says nothing, and what the argument is about.
_SELECTION: dict[str, tuple[Any, str]] = {
    "wire": ("auto", "the values that a sparsifier selects"),
    "dense": (None, "which parameters a sparsifier leaves whole"),
    "sparsify": ("auto", "when a sparsifier selects"),
    "warmup": (None, "how much a sparsifier selects"),
}
_SELECTING = ("oktopk", "masked")  # exchanges that are nothing without a selection


class Cast(sparsifiers.Compressor):
    """Send every element, in the gradient's own dtype ("none") or cast to 16 bits ("fp16", "bf16")."""

    kind = sparsifiers.Kind.DENSE

    def __init__(self, name: str) -> None:
        self.name = name
        self.dtype = CASTS[name]  # None: nothing is cast, and nothing lost
        self.memory = "none" if self.dtype is None else "residual"


def resolve_auto(compression: Any, optimizer: torch.optim.Optimizer, memory: Any, sync: str = GRADIENTS) -> Any:
    """Return ``compression``, or what ``"auto"`` stands for with this optimizer, by the figures of docs/parity.md.

    With ``sync="updates"``, where momentum is the optimizer's business, that is ``"topk"``. Else:

    ``"dgc"``, whose memory applies momentum before selection, where there is an SGD's momentum to apply, or a memory
    that does so is asked for; else ``"topk"``. Where there is weight decay too it is ``"topk"``: the memory has no
    momentum for it, so it would be weaker than the script says, and nobody has asked for that. ``memory``: the argument
    of the script, None where it gives none.
    """
    if not isinstance(compression, str) or spelling(compression) != AUTO:
        return compression
    if sync == UPDATES:
        return "topk"
    if memory is None:
        decays = any(group.get("weight_decay") for group in optimizer.param_groups)
        return "dgc" if momentum.applies(optimizer) and not decays else "topk"
    asked = sparsifiers.memory(memory) if isinstance(memory, str) else memory
    return "dgc" if getattr(asked, "corrects", False) else "topk"


def cast_name(compression: Any) -> str | None:
    """Return ``"none"``, ``"fp16"`` or ``"bf16"`` for a cast, in whatever way it is given; None for anything else."""
    if isinstance(compression, Compression):
        return compression.value
    name = horovod_names.compression(compression) or (spelling(compression) if isinstance(compression, str) else None)
    return name if name in CASTS else None


def check_meaning(compression: Any, given: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if an argument of ``given`` is about selection, and ``compression`` selects nothing.

    A number as ``density``, and ``exchange="sparse"``, say how a sparsifier is to go about it, so they may stay in a
    script that swaps its compressor by name.
    """
    sends_all = isinstance(compression, sparsifiers.Compressor) and not compression.selects
    if cast_name(compression) is None and not sends_all:
        return
    for name, value in given.items():
        usual, about = _SELECTION.get(name, (value, ""))
        if name == "density" and (isinstance(value, dict) or value == "importance"):
            about = "how much a sparsifier selects of which parameter"
        elif name == "exchange" and value in _SELECTING:
            about = "how ranks combine what a sparsifier selects"
        elif name == "decay" and value != 1.0:
            about = "what a sparsifier leaves behind"
        elif value is usual or (isinstance(value, str) and value in (usual, "partial")):  # that has its own words
            continue
        raise ValueError(
            f"{name}={value!r} is about {about}, and compression={compression!r} sends every element: leave {name} "
            "out, or give a sparsifier's name as compression (to send everything at first: a sparsifier, and then "
            "set_compressor())"
        )


def compressor_of(compression: Any, density: Any) -> sparsifiers.Compressor:
    """Return the compressor that is meant: by a name, or an object that is one. Raises ``ValueError`` or ``TypeError``.

    ``density``: the one number that a sparsifier given by name gets; one that is an object must have it already.
    """
    try:
        sparsifiers.budget(density, 1)  # checked also where it is not needed
    except ValueError as error:
        raise ValueError(f"density={density!r}: {error}") from None
    cast = cast_name(compression)
    if cast == "none" and not isinstance(compression, str) and workers.is_initialized() and workers.rank() == 0:
        warnings.warn(DENSE, UserWarning, stacklevel=6)  # the object of a script that was Horovod's
    if cast is not None:
        return Cast(cast)
    if isinstance(compression, sparsifiers.Compressor):
        if compression.selects and density not in (DENSITY, compression.density):
            raise ValueError(
                f"density={density!r} and compression={compression!r} disagree: give the density to the compressor only"
            )
        return compression
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
        return sparsifiers.get(compression, density=density)
    except ValueError as error:
        text = f"compression={compression!r}, density={density!r}: {error}"
        near = get_close_matches(compression.casefold(), [AUTO, *CASTS], n=1)
        meant = _MEANT.get(spelling(compression)) or next(iter(near), "")
        hint = f"; did you mean {meant!r}?" if meant and "did you mean" not in text else ""
        raise ValueError(f"{text}; besides these: {AUTO}, {', '.join(CASTS)}{hint}") from None


def _names() -> str:
    return ", ".join((AUTO, *sparsifiers.names(), *CASTS))


def memory_for(memory: Any, compressor: sparsifiers.Compressor) -> sparsifiers.Memory:
    """Return the memory that is asked for, or the compressor's own (``memory`` None).

    Raises ``ValueError`` or ``TypeError`` for one that does not fit.
    """
    if memory is None:
        return sparsifiers.memory(compressor.memory)
    given = sparsifiers.memory(memory) if isinstance(memory, str) else memory
    if not isinstance(given, sparsifiers.Memory):
        raise TypeError(f"memory={memory!r}: give a name or a sparsifiers.Memory")
    if given.has_momentum and not compressor.selects:
        raise ValueError(f"memory={memory!r} has momentum for what a sparsifier selects; give it to a sparsifier")
    if isinstance(compressor, Cast) and compressor.dtype is None and given.has_residual:
        raise ValueError(f"memory={memory!r} keeps what a compressor drops, and compression='none' drops nothing")
    return given


def densities_of(density: Any) -> tuple[tuple[re.Pattern[str], float], ...]:
    """Return densities by pattern for whole names, in the order given; empty for a number.

    Raises ``ValueError`` for an empty dict, a pattern that is none, or a density outside (0, 1].
    """
    if not isinstance(density, dict):
        return ()
    if not density:
        raise ValueError("density={}: give at least one pattern for whole names, or a number")
    patterns = []
    for pattern, value in density.items():
        try:
            sparsifiers.budget(value, 1)
            patterns.append((re.compile(pattern), float(value)))
        except (TypeError, ValueError, re.error) as error:
            raise ValueError(f"density={{{pattern!r}: {value!r}}}: {error}") from None
    return tuple(patterns)
