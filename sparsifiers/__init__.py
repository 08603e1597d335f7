"""Which coordinates of a vector to send, and the memories that keep the rest.

    >>> import torch, sparsifiers
    >>> chosen = sparsifiers.get("topk", density=0.25).select(torch.tensor([0.5, -3.0, 2.0, 0.0]))
    >>> chosen.trimmed().tolist()
    [1]

A sparsifier reads one 1-D vector and says where its important coordinates are; it never changes the
vector and never communicates. A memory says what becomes of the coordinates that were not sent. This
package needs torch, numpy and the standard library, and knows nothing of the rest of the house.
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
