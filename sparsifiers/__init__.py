# SPDX-License-Identifier: Apache-2.0
"""Compressors of gradients, and memories, which keep the coordinates that are not sent as a residual.

    >>> import torch, sparsifiers
    >>> chosen = sparsifiers.get("topk", density=0.25).select(torch.tensor([0.5, -3.0, 2.0, 0.0]))
    >>> chosen.trimmed().tolist()
    [1]

A sparsifier reads one 1-D vector and returns the places of its important coordinates; it never changes the vector and
never communicates. A memory keeps, or drops, the residual. `Compressor` is the common base of sparsifiers and
compressors that select nothing: a `LowRank` sends two factors of a matrix, and a `Quantiser` every coordinate in few
bits; `quantisers()` names these, and `quantiser(name)` makes one. This package needs torch, numpy and the standard
library, and imports neither `agmerge` nor `merging`.
"""

from __future__ import annotations

from sparsifiers.arguments import Request, budget
from sparsifiers.base import Selection, Sparsifier
from sparsifiers.by_name import ByName
from sparsifiers.catalogue import (
    get,
    is_low_rank,
    is_quantiser,
    low_rank,
    low_rank_names,
    memory,
    names,
    quantiser,
    quantisers,
    register,
    register_quantiser,
)
from sparsifiers.compensation import Momentum, Rate
from sparsifiers.compressor import Compressor, Kind
from sparsifiers.low_rank import ACPSGD, LowRank, PowerSGD
from sparsifiers.memories import Memory
from sparsifiers.quantising.base import Quantiser

__all__ = [
    "ACPSGD",
    "ByName",
    "Compressor",
    "Kind",
    "LowRank",
    "Memory",
    "Momentum",
    "PowerSGD",
    "Quantiser",
    "Rate",
    "Request",
    "Selection",
    "Sparsifier",
    "budget",
    "get",
    "is_low_rank",
    "is_quantiser",
    "low_rank",
    "low_rank_names",
    "memory",
    "names",
    "quantiser",
    "quantisers",
    "register",
    "register_quantiser",
]
