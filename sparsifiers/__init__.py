# SPDX-License-Identifier: Apache-2.0
"""Compressors of gradients, and memories, which keep unsent values as a residual.

    >>> import torch, sparsifiers
    >>> chosen = sparsifiers.get("topk", density=0.25).select(torch.tensor([0.5, -3.0, 2.0, 0.0]))
    >>> chosen.trimmed().tolist()
    [1]

There are three kinds of compressors, with `Compressor` as their base class:

* A `Sparsifier` selects the important coordinates of a 1-D vector. Make one with `get(name)`.
* A `Quantizer` sends every coordinate in few bits. Make one with `quantizer(name)`.
* A `LowRank` compressor sends two thin factors of a matrix. Make one with `low_rank(name)`.

Compressors do not change the gradient, and do not communicate. A `Memory` keeps or drops the residual. This package
needs only torch, NumPy and the standard library. It imports neither `agmerge` nor `merging`.
"""

# Files, for those who read on:
#
# * base: the contracts. catalogue: compressors and memories by name. name_patterns: patterns for parameters.
# * largest: topk, on the host and, by torch or gpu/, on devices. rows, rows_search: the largest of each row.
# * custom: compressors of a script's own class; object_state: what they keep. randomk, dgc, estimated, papers/: others.
# * low_rank: PowerSGD and ACP-SGD. quantising/: quantizers.
# * memories: error feedback. deferred: selections made later, perhaps in a message.
# * native: the compiled loops of csrc/*.c, in one table. thin_factors: those of low rank.
# * conformance and conformance_*: checks of a compressor of your own. proof: measured quality of selections.

from __future__ import annotations

from sparsifiers.base import ByName, Compressor, Kind, Request, Selection, Sparsifier, budget
from sparsifiers.catalogue import (
    get,
    is_low_rank,
    is_quantiser,
    is_quantizer,
    low_rank,
    low_rank_names,
    memory,
    names,
    quantiser,
    quantisers,
    quantizer,
    quantizers,
    register,
    register_quantiser,
    register_quantizer,
)
from sparsifiers.custom import Custom
from sparsifiers.low_rank import ACPSGD, LowRank, PowerSGD
from sparsifiers.memories import Memory, Momentum, Rate
from sparsifiers.quantising.base import Quantiser, Quantizer

# Names with "quantis" are the old spelling of those with "quantiz".
__all__ = [
    "ACPSGD",
    "ByName",
    "Compressor",
    "Custom",
    "Kind",
    "LowRank",
    "Memory",
    "Momentum",
    "PowerSGD",
    "Quantiser",
    "Quantizer",
    "Rate",
    "Request",
    "Selection",
    "Sparsifier",
    "budget",
    "get",
    "is_low_rank",
    "is_quantiser",
    "is_quantizer",
    "low_rank",
    "low_rank_names",
    "memory",
    "names",
    "quantiser",
    "quantisers",
    "quantizer",
    "quantizers",
    "register",
    "register_quantiser",
    "register_quantizer",
]
