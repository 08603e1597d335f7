"""Choose which coordinates of a vector to send, and keep the rest in a memory.

    >>> import torch, sparsifiers
    >>> chosen = sparsifiers.get("topk", density=0.25).select(torch.tensor([0.5, -3.0, 2.0, 0.0]))
    >>> chosen.trimmed().tolist()
    [1]

A sparsifier reads one 1-D vector and returns the places of its important coordinates; it never changes the vector and
never communicates. A memory keeps, or drops, what was not sent. `Compressor` is what a sparsifier has in common with
compressors that select nothing. This package needs torch, numpy and the standard library, and imports neither
`agmerge` nor `merging`.
"""

from __future__ import annotations

from sparsifiers.arguments import Request, budget
from sparsifiers.base import Selection, Sparsifier
from sparsifiers.catalogue import get, memory, names, register
from sparsifiers.compressor import Compressor, Kind
from sparsifiers.memories import Memory, Momentum, Rate

__all__ = [
    "Compressor",
    "Kind",
    "Memory",
    "Momentum",
    "Rate",
    "Request",
    "Selection",
    "Sparsifier",
    "budget",
    "get",
    "memory",
    "names",
    "register",
]
