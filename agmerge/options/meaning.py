# SPDX-License-Identifier: Apache-2.0
"""Refuse options that mean nothing with a compression: of selection where nothing is selected, and the like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sparsifiers
from agmerge.exchanges.table import EXCHANGES
from agmerge.options import published
from agmerge.options.compressors import cast_name
from agmerge.step.config import AUTO, FASTEST
from agmerge.step.density_policy import IMPORTANCE, NAME

# Options about compression alone, and those of them about selection.
_COMPRESSION = {
    "wire": "the format of the values that a compressor sends",
    "dense": "which parameters stay uncompressed",
}
_SELECTION = {"sparsify": "when a sparsifier selects", "warmup": "how many values a sparsifier selects"}


def selecting() -> list[str]:
    """Return the names of exchanges that mean nothing without a selection."""
    return [FASTEST, *(name for name, exchange in EXCHANGES.items() if exchange.needs_selection)]


def check_meaning(compression: Any, given: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if an argument of ``given`` is about something that ``compression`` does not do.

    A number as ``density``, and ``exchange="sparse"``, have a meaning for every compressor, so they may stay in a
    script that swaps its compressor by name. A rank is of factors alone.
    """
    selects, factorises, compresses = _abilities(compression)
    quantises = compresses and not selects and not factorises
    sends = "every element" if not compresses or quantises else "factors, and selects nothing"
    for name, value in given.items():
        if value is None or isinstance(value, str) and value == AUTO:
            continue
        about, instead = "", "a sparsifier's name"
        if not compresses and name in _COMPRESSION and not (name == "dense" and value == NAME):
            about = _COMPRESSION[name]
        elif quantises and name == "wire":
            about, instead = _COMPRESSION[name], "a sparsifier's name, or another quantizer's"
        elif not selects and name in _SELECTION:
            about = _SELECTION[name]
        elif not selects and name == "density" and (isinstance(value, dict) or value == IMPORTANCE):
            about = "how many values a sparsifier selects of each parameter"
        elif not selects and name == "exchange" and value in selecting():
            about = "how ranks combine the values that a sparsifier selects"
        elif not factorises and name == "rank":
            about, sends = "the rank of low-rank factors", "no factors"
            instead = "'powersgd' or 'acpsgd'"
        elif not compresses and name == "decay" and value != 1.0:
            about = "how fast the residual of a compressor decays"
        if about:
            at_first = ". To start uncompressed, set a sparsifier, then call set_compressor('none')"
            raise ValueError(
                f"{name}={value!r} has no effect with compression={compression!r}, which sends {sends}: {name} sets "
                f"{about}. Remove {name}=, or set compression= to {instead}{at_first if name != 'rank' else ''}."
            )


def _abilities(compression: Any) -> tuple[bool, bool, bool]:
    """Return whether a compression selects, whether it factorises, and whether it compresses at all, casts apart.

    An unknown name counts as a sparsifier: the error about it comes later.
    """
    if cast_name(compression) is not None:
        return False, False, False
    if isinstance(compression, sparsifiers.Compressor):
        return compression.selects, sparsifiers.Kind.LOW_RANK in compression.kinds, compression.compresses
    if isinstance(compression, Mapping):
        each = [_abilities(part) for part in compression.values()]
        return any(s for s, _, _ in each), any(f for _, f, _ in each), any(c for _, _, c in each)
    if isinstance(compression, (list, tuple)):  # a choice: names that cannot be chosen are refused later
        return False, False, any(name != published.NONE for name in compression)
    low_rank = sparsifiers.is_low_rank(compression)
    return not low_rank and not sparsifiers.is_quantiser(compression), low_rank, True


def has_codecs(compression: Any) -> bool:
    """Return whether codecs can make the values of a compressor smaller: a sparsifier's; factors are added up."""
    selects, factorises, _ = _abilities(compression)
    return selects and not factorises
